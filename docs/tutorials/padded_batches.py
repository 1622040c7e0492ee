"""
Causal attention on padded batches
==================================

Sentences have different lengths. To compute them together, they are padded to the longest one. A decoder then needs a mask with
two conditions: a token attends to no later token, and to no padding. This tutorial writes that mask by hand, then with
flexmask, and runs it in plain PyTorch, in ``scaled_dot_product_attention`` and in FlexAttention. At the end it explains what
happens in the rows of padding.
"""

import torch
import torch.nn.functional as F

import flexmask
from flexmask import MultiheadFlexAttention, causal, key_padding, query_padding
from flexmask.plotting.mpl import plot_scores

torch.manual_seed(0)

# %%
# A padded batch
# --------------
# Three sentences of 3, 5 and 4 tokens, in a batch of 3 sequences of 5 tokens. The batch has queries, keys and values of 2 heads
# with 8 channels each, in the layout ``[batch, heads, length, channels]``.

sentences = ["the cat sat", "a dog barked at night", "birds sing at dawn"]
words = [sentence.split() for sentence in sentences]
lengths = torch.tensor([len(sentence) for sentence in words])
longest = int(lengths.max())
tokens = [sentence + ["<pad>"] * (longest - len(sentence)) for sentence in words]
for row in tokens:
    print(row)

query, key, value = (torch.randn(3, 2, longest, 8) for _ in range(3))

# %%
# The mask by hand
# ----------------
# ``visible[b, h, q, kv]`` is True where query ``q`` of sequence ``b`` attends to key ``kv``. It is a table: its size is the
# product of the two lengths.

position = torch.arange(longest)
no_later_token = position[None, :] <= position[:, None]
real_key = position[None, :] < lengths[:, None]
visible = no_later_token & real_key[:, None, None, :]
print(visible.shape)

# %%
# Dense attention computes all scores, sets those that are masked out to ``-inf``, and takes the softmax. Their weights are then
# 0.

scores = query @ key.transpose(-2, -1) / 8**0.5
weights = torch.softmax(scores.masked_fill(~visible, float("-inf")), dim=-1)
dense = weights @ value
print(weights[0, 0].round(decimals=2))

# %%
# The mask with flexmask
# ----------------------
# The same mask is one expression. It has no lengths of its own: it is a value that can be printed, compared and stored.

mask = causal() & key_padding(lengths)
print(mask)
print(torch.equal(mask.dense(longest), visible))

# %%
# A picture shows what each query attends to. Queries go down, keys go across. ``why=True`` colors each hidden cell by the
# condition that masks it out.

mask.plot_panels(longest, why=True)

# %%
# One sequence with its words:

mask.plot(longest, batch=0, tokens=tokens[0], why=True)

# %%
# Running it
# ----------
# ``scaled_dot_product_attention`` takes the table. True means "attend" there too.

sdpa = F.scaled_dot_product_attention(query, key, value, attn_mask=mask.dense(longest))
print((sdpa - dense).abs().max() < 1e-6)

# %%
# FlexAttention takes a ``BlockMask`` instead: for each block of queries, the list of the blocks of keys that have to be
# computed. flexmask computes it from the key intervals of each query, without the table. (A block has 128 tokens by default, so
# that this small batch is one block.)

block_mask = mask.block_mask(longest)
print(block_mask.shape, block_mask.kv_num_blocks.tolist())

# %%
# :func:`flexmask.attention` takes the mask itself and picks the implementation. On the CPU that is ``"sdpa"``, which has
# gradients; on a GPU it is ``"flex"``, compiled FlexAttention. Both give the same result.

for backend in ("sdpa", "flex"):
    out = flexmask.attention(query, key, value, mask, backend=backend)
    print(backend, (out - dense).abs().max() < 1e-5)

# %%
# Rows of padding
# ---------------
# The first sentence has 3 tokens, so rows 3 and 4 of its table belong to padding. ``key_padding`` masks out columns only: these
# rows still attend to the real tokens. Their output is not used, since the loss skips padding.
#
# Masking out the rows as well looks tidier, but then their softmax is over nothing. Dense attention returns NaN for them:

both = visible & real_key[:, None, :, None]
weights = torch.softmax(scores.masked_fill(~both, float("-inf")), dim=-1)
leaf = value.clone().requires_grad_()
out = weights @ leaf
print(out[0, 0, :, 0].detach())

# %%
# A loss over the real rows alone does not help. The gradient of a skipped row is 0, but the gradient of ``value`` is the
# transposed weights times it, and 0 times NaN is NaN. From there it reaches the weights of the model.

out.transpose(1, 2)[real_key].sum().backward()
print(leaf.grad[0, 0, :, 0])

# %%
# In flexmask a fully masked row gives output 0 and gradient 0, in every implementation:

rows_too = mask & query_padding(lengths)
print(flexmask.attention(query, key, value, rows_too)[0, 0, :, 0])

# %%
rows_too.plot(longest, batch=0, tokens=tokens[0], why=True)

# %%
# In a module
# -----------
# ``MultiheadFlexAttention`` projects the input to queries, keys and values, attends, and projects back. It takes the mask in
# each call.

layer = MultiheadFlexAttention(d_in=16, d_out=16, n_heads=2)
x = torch.randn(3, longest, 16)
out = layer(x, mask)
print(out.shape)

# %%
# Does padding reach a real token? Change all tokens of padding, and compare the outputs of real tokens:

is_padding = ~real_key
other = x.clone()
other[is_padding] = 100.0
moved = (layer(other, mask) - out).abs().amax(-1)
print("real tokens move by", moved[real_key].max().item())
moved = (layer(other, causal()) - layer(x, causal())).abs().amax(-1)
print("with causal alone by", moved[real_key].max().item())

# %%
# The second number is 0 as well. With padding on the *right*, a causal mask alone already hides padding from every real token,
# since all padding comes later. So when is ``key_padding`` needed?
#
# - Where a query may attend to later tokens: in an encoder, in cross-attention, in a prefix.
# - With padding on the *left*, as in batched generation: ``key_padding(start=...)`` is the position of the first real token.
# - Where rows of padding are used after all, for example in a mean over the sequence.

pad = longest - lengths
left = causal() & key_padding(start=pad)
left.plot(longest, batch=0, tokens=["<pad>", "<pad>", *words[0]], why=True)

# %%
# Here rows 0 and 1 attend to nothing at all, so this mask needs an implementation that defines fully masked rows.
#
# Weights as a picture
# --------------------
# :meth:`~flexmask.MultiheadFlexAttention.attention_weights` returns the weights after the softmax, and ``plot_scores`` draws
# them. Cells that the mask hides stay gray.

plot_scores(layer.attention_weights(x, mask), mask, head=0, tokens=tokens[0])

# %%
# Next: :doc:`cross_attention`, where queries and keys come from two sequences.
