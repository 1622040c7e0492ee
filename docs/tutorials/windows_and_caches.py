"""
Windows and KV caches
=====================

A window limits how far back a query attends, and with that the cost of attention and the memory of decoding. This tutorial
shows the ways in which windows are counted, what they save, and how a model decodes with a cache: one sequence, sequences of
different lengths, and a cache that drops old keys.
"""

import torch

import flexmask
from flexmask import KVCache, MultiheadFlexAttention, causal, key_padding, per_head, sliding_window
from flexmask.masks import dilated_window, sink_window

torch.manual_seed(0)

# %%
# How a window is counted
# -----------------------
# "A window of 4" means 4 keys in some libraries and 5 in others: the query's own position is counted or it is not. flexmask has
# no bare number. ``left`` and ``right`` are distances, which do not count the query's own position; ``size`` is a number of
# keys, which does.

print(sliding_window(size=4).equals(sliding_window(left=3, right=0), q_len=16))
sliding_window(left=3, right=0).plot(16)

# %%
# ``right`` is for encoders. ``None`` is no limit.

sliding_window(left=3, right=3).plot(16)

# %%
# Other windows
# -------------
# Attention sinks keep the first tokens visible. A dilated window attends to every n-th key. Each head may have its own mask.

sink_window(sinks=2, left=3).plot(16)

# %%

heads = per_head([sliding_window(size=4), dilated_window(left=12, right=0, dilation=4), causal()])
heads.plot_panels(16)

# %%
# What a window saves
# -------------------
# The work of attention grows with the square of the length under a causal mask, and linearly under a window.

for length in (4096, 16384, 65536):
    full, window = causal().stats(length), sliding_window(size=1024).stats(length)
    print(f"{length:6} tokens: {full.visible:13,} cells causal, {window.visible:11,} in the window")

# %%
# Decoding
# --------
# Without a cache, each new token would compute the keys and values of all earlier tokens again. A :class:`~flexmask.KVCache`
# keeps them. Each call gives the new tokens only, one or several, and the mask of the *whole* sequence. The outputs equal those
# of one call on the whole sequence. So the mask must hide all keys after the tokens of the call, as ``mask & causal()`` always
# does; one that shows such a key is an error.

layer = MultiheadFlexAttention(16, 16, 2).eval()
x = torch.randn(1, 12, 16)
mask = sliding_window(size=4)

with torch.no_grad():
    whole = layer(x, mask)
    cache = KVCache(capacity=12)
    prompt = layer(x[:, :8], mask, cache=cache)
    steps = [layer(x[:, place : place + 1], mask, cache=cache) for place in range(8, 12)]
print("tokens in the cache:", cache.length)
print("greatest difference:", (torch.cat([prompt, *steps], dim=1) - whole).abs().max().item())

# %%
# For another prompt call ``cache.reset()``, or make a new cache. Otherwise its tokens are appended to those of the first prompt.
# The cache of cross-attention keeps the keys of its first context: call ``reset()`` for another. Without it a context of the same
# shape is not read, and one of another batch or length is an error.
#
# In a picture: the rows of the prompt, then one row for each step.

mask.plot(12, q_offset=0, title="the whole sequence")

# %%

mask.plot(1, 12, q_offset=8, title="the step at position 8")

# %%
# With projections of your own, ``cache.step`` gives what to attend to, and ``step.commit()`` counts the tokens in.

with torch.no_grad():
    cache = KVCache(capacity=12)
    for part in torch.randn(1, 2, 12, 8).split([8, 1, 1, 1, 1], dim=2):
        step = cache.step(part, part, part, mask)  # query, key and value [B, heads, length, d_head]
        out = flexmask.attention(part, step.key, step.value, step.mask, q_offset=step.q_offset)
        step.commit()
print("tokens in the cache:", cache.length)

# %%
# For a cache of your own, lower the mask with ``q_offset=``, the position of the first query: an int, or an integer tensor with
# one position for each sequence.

print(mask.block_mask(q_len=1, kv_len=12, q_offset=8, block_size=4).kv_indices.tolist())
print(mask.dense(1, 12, q_offset=torch.tensor([8, 3])).int().tolist())

# %%
# A cache that drops old keys
# ---------------------------
# Under a window, old keys are never read again. ``KVCache(window=4)`` drops them, so that its memory does not grow. A mask whose
# expression has no such limit is an error, not a wrong result. Attention sinks and ``KVCache(window=...)`` exclude each other,
# since the window drops the first keys: with ``sink_window`` give ``KVCache(capacity)``.

with torch.no_grad():
    cache = KVCache(window=4)
    rows = [layer(x[:, place : place + 1], mask, cache=cache) for place in range(12)]
    print("keys in the cache:", cache.key.shape[2], "of", cache.length)
    print("greatest difference:", (torch.cat(rows, dim=1) - whole).abs().max().item())
    try:
        layer(x[:, :1], causal(), cache=cache)
    except ValueError as error:
        print(error)

# %%
# Prompts of different lengths
# ----------------------------
# Two ways. With padding on the left all sequences have the same position, and the mask hides the first keys in every call:

lengths = torch.tensor([5, 8])
pad = 8 - lengths
left = causal() & key_padding(start=pad)
left.plot_panels(12, why=True)

# %%
# With padding on the right, the padding is cut off after the prompt. From then on each sequence has its own position.

with torch.no_grad():
    cache = KVCache(capacity=12)
    x = torch.randn(2, 8, 16)
    layer(x, causal() & key_padding(lengths), cache=cache)
    cache.truncate(lengths)
    print("positions:", cache.length.tolist())
    new = torch.randn(2, 1, 16)
    step = layer(new, causal(), cache=cache)
    alone = layer(torch.cat([x[:1, :5], new[:1]], dim=1), causal())[:, -1:]
    print("sequence 0 as alone:", (step[:1] - alone).abs().max().item() < 1e-6)

# %%
# A mask that shows padding which is still in the cache is an error too. :class:`flexmask.KVCache` says how to decode under
# ``torch.compile``.
