"""
Packing documents without leaks
===============================

A batch of documents of different lengths wastes work on padding. Packing puts several documents into one sequence instead. Then
a causal mask alone is wrong: each document attends to the documents before it. This tutorial packs documents, isolates them
with a mask, and shows that a packed document gives the same output as the document alone.
"""

import torch

import flexmask
from flexmask import MultiheadFlexAttention, causal, document, key_padding, per_document, prefix_lm
from flexmask.testing import assert_no_leak

torch.manual_seed(0)

# %%
# Padded and packed
# -----------------
# Six documents of 92 tokens together. Padded to the longest one they take 180 positions; packed into two sequences of 48 they
# take 96.

padded_lengths = [30, 9, 14, 21, 6, 12]
packed_lengths = [[30, 12, 6], [9, 14, 21]]
print("tokens:", sum(padded_lengths), " padded:", 6 * 30, " packed:", 2 * 48)

# %%
# The mask
# --------
# ``document(lengths=...)`` takes the lengths of the documents in each sequence. Tokens after the last document are an error,
# unless ``padding=True`` says that they are padding.

mask = causal() & document(lengths=packed_lengths, padding=True)
print(mask)
mask.plot_panels(48, why=True)

# %%
# Other ways to say where documents are: the document of each token, cumulative lengths as in variable-length attention, or
# positions that start again in each document. They give the same mask.

cu_seqlens = torch.tensor([[0, 30, 42, 48], [0, 9, 23, 44]])
ids = torch.tensor([[0] * 30 + [1] * 12 + [2] * 6, [0] * 9 + [1] * 14 + [2] * 21 + [-1] * 4])  # below 0 is padding
print(mask.equals(causal() & document(cu_seqlens=cu_seqlens, padding=True), 48))
print(mask.equals(causal() & document(ids), 48))

# %%
# What is saved
# -------------
# Attention skips blocks in which nothing is visible. With blocks of 8 tokens (FlexAttention's default is 128, and real
# documents are longer) the picture shows which blocks are computed; the statistics count them.

mask.plot(48, block_size=8)

# %%

for name, each, length in (("padded", causal() & key_padding(padded_lengths), 30), ("packed", mask, 48)):
    stats = each.stats(length, block_size=8)
    print(
        f"{name}: {stats.visible} visible cells, {stats.partial_blocks + stats.full_blocks} of {stats.blocks} blocks are computed"
    )

# %%
# The picture shows the first sequence. In a long sequence the difference is between possible and impossible: a boolean tensor
# of a million tokens has 10\ :sup:`12` cells. flexmask computes the ``BlockMask`` from the key intervals of each query instead.

million = causal() & document(lengths=torch.full((128,), 8192))
print(million.stats(2**20).visible_fraction)
print(flexmask.explain(causal() & document(lengths=torch.full((16,), 4096)), 65536))

# %%
# The same output as alone
# ------------------------
# In a layer with the mask, each packed document has the output that it has alone. A position that the model adds to its input,
# or rotates queries and keys by, must restart in each document: that is not a matter of the mask.

layer = MultiheadFlexAttention(16, 16, 2).double()
documents = [torch.randn(length, 16, dtype=torch.float64) for length in packed_lengths[0]]
packed = layer(torch.cat(documents)[None], causal() & document(lengths=packed_lengths[0]))
alone = torch.cat([layer(each[None], causal())[0] for each in documents])
print((packed[0] - alone).abs().max() < 1e-12)

# %%
# With a causal mask alone the second document sees the first:

leaking = layer(torch.cat(documents)[None], causal())
print((leaking[0] - alone).abs().amax(-1)[[0, 29, 30, 41, 42, 47]])

# %%
# Rows 0 and 29 belong to the first document, which has nothing before it. The loss of such a model still goes down, so that the
# error is easy to miss. :func:`~flexmask.testing.assert_no_leak` finds it: here it checks a layer that ignores documents
# against the mask that it should have.

x = torch.randn(1, 48, 16)
layer = MultiheadFlexAttention(16, 16, 2)
assert_no_leak(lambda x: layer(x, mask), mask, torch.randn(2, 48, 16))
try:
    assert_no_leak(lambda x: layer(x, causal()), causal() & document(lengths=packed_lengths[0]), x)
except AssertionError as error:
    print(str(error).split("\n\n")[0])

# %%
# Masks within each document
# --------------------------
# ``&`` composes a mask of documents with a mask of positions in the packed sequence. A mask whose positions count from the
# start of each document is ``per_document``: here a prefix of 4 tokens in each.

prompts = per_document(prefix_lm(4), lengths=packed_lengths, padding=True)
prompts.plot(48, why=True)

# %%
# Batches of a training loop
# --------------------------
# Documents change in each step. Text with parameters is bound to the data of the step; under ``torch.compile`` the data is an
# input of the graph. ``flexmask.plan`` analyzes the mask once, and each step lowers it from its data alone.

layer = MultiheadFlexAttention(16, 16, 2, mask="causal & document(cu_seqlens=cu, padding=True)")
out = layer(torch.randn(2, 48, 16), cu=cu_seqlens)
plan = flexmask.plan("causal & document(cu_seqlens=cu, padding=True)", q_len=48, batch=2)
same = MultiheadFlexAttention(16, 16, 2)(torch.randn(2, 48, 16), plan(cu=cu_seqlens))  # one plan serves all layers
print(out.shape, same.shape)

# %%
# The next token of the last token in a document belongs to the next document. The loss must skip it: compare the document of
# each token with that of the next one.

has_target = (ids[:, :-1] == ids[:, 1:]) & (ids[:, :-1] >= 0)
print(has_target.sum().item(), "of", ids[:, :-1].numel(), "positions have a target")
