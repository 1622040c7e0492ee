"""
Cross-attention and an encoder-decoder
======================================

In cross-attention the queries come from one sequence, the keys and values from another: from the words of a translation to the
words of its source. Both sides of a batch are padded, each to its own length. This tutorial builds a small encoder-decoder that
writes numbers in reverse, and decodes with a cache.
"""

import matplotlib.pyplot as plt
import torch
from torch import nn

from flexmask import KVCache, MultiheadFlexAttention, causal, cross_length, key_padding
from flexmask.plotting.mpl import plot_scores
from flexmask.testing import assert_no_leak

torch.manual_seed(0)

# %%
# Three masks
# -----------
# A batch of three sources with 6, 3 and 5 tokens, and targets with 7, 4 and 6 tokens. The model needs a mask in three places:
#
# - the encoder attends to all real tokens of the source,
# - the decoder attends to earlier tokens of the target,
# - cross-attention goes from each token of the target to the real tokens of the source.

source_lengths, target_lengths = torch.tensor([6, 3, 5]), torch.tensor([7, 4, 6])
encoder_mask = key_padding(source_lengths)
decoder_mask = causal() & key_padding(target_lengths)
cross_mask = cross_length(source_lengths)

figure, axes = plt.subplots(1, 3, figsize=(11, 4.5))
for axis, name, mask, q_len, kv_len in zip(
    axes,
    ("encoder", "decoder", "cross-attention"),
    (encoder_mask, decoder_mask, cross_mask),
    (6, 7, 7),
    (6, 7, 6),
    strict=True,
):
    mask.plot(q_len, kv_len, batch=1, ax=axis, title=f"{name}, sequence 1")

# %%
# The picture shows the second sequence, with 3 tokens in its source and 4 in its target. The mask of cross-attention is not
# square, and it has no causal part: the whole source is known before the first word of the target. ``cross_length`` with one
# argument masks out the keys of padding, as ``key_padding`` does; with ``q_lengths=`` it also masks out the rows of padding.
# Where the source has an ``attention_mask`` of 0 and 1, the mask is ``key_padding(keep=attention_mask)``.
#
# The model
# ---------
# ``context=`` turns :class:`~flexmask.MultiheadFlexAttention` into cross-attention.


class Layer(nn.Module):
    def __init__(self, width, heads, crosses):
        super().__init__()
        self.attend = MultiheadFlexAttention(width, width, heads)
        self.cross = MultiheadFlexAttention(width, width, heads) if crosses else None
        self.feed_forward = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))

    def forward(self, x, mask, context=None, context_mask=None, caches=(None, None)):
        x = x + self.attend(self.norms[0](x), mask, cache=caches[0])
        if self.cross is not None:
            x = x + self.cross(self.norms[1](x), context_mask, context=context, cache=caches[1])
        return x + self.feed_forward(self.norms[2](x))


class Reverser(nn.Module):
    """Writes the digits of the source in reverse. Token 10 is the begin, 11 the end."""

    def __init__(self, width=32, heads=2):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(12, width), nn.Embedding(16, width)
        self.encoder, self.decoder = Layer(width, heads, crosses=False), Layer(width, heads, crosses=True)
        self.out = nn.Linear(width, 12)

    def embed(self, tokens, start=0):
        return self.tokens(tokens) + self.positions(torch.arange(start, start + tokens.shape[1]))

    def encode(self, source, mask):
        return self.encoder(self.embed(source), mask)

    def decode(self, x, encoded, mask, cross_mask, caches=(None, None)):
        return self.out(self.decoder(x, mask, encoded, cross_mask, caches))


# %%
# Training
# --------
# A batch has sources of 2 to 6 digits. The target begins with the begin token and ends with the end token; the model predicts
# each token from those before it. The loss skips padding.


def batch(size):
    lengths = torch.randint(2, 7, (size,))
    source = torch.randint(0, 10, (size, 6))
    target = torch.full((size, 8), 11)
    target[:, 0] = 10
    for row, length in enumerate(lengths.tolist()):
        target[row, 1 : length + 1] = source[row, :length].flip(0)
    return source, lengths, target


def loss_of(model, source, lengths, target):
    encoded = model.encode(source, key_padding(lengths))
    # The target without its last token has lengths + 1 real tokens: the begin and the digits.
    scores = model.decode(model.embed(target[:, :-1]), encoded, causal() & key_padding(lengths + 1), cross_length(lengths))
    is_real = torch.arange(7) <= lengths[:, None]
    return nn.functional.cross_entropy(scores[is_real], target[:, 1:][is_real])


model = Reverser()
steps = 300
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 5e-3, total_steps=steps)
for step in range(steps):
    loss = loss_of(model, *batch(32))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
    if step % 100 == 0 or step == steps - 1:
        print(f"step {step:3}  loss {loss.item():.3f}")

# %%
# Decoding with a cache
# ---------------------
# A :class:`~flexmask.KVCache` keeps the keys and values of earlier tokens, so that each call computes one token.
# Cross-attention has a cache too: it computes the keys of the source once, in the first call. For another source make new caches,
# as ``reverse`` does, or call ``reset()`` on both. The mask of the decoder is ``causal()`` of the whole target.


@torch.no_grad()
def reverse(digits):
    source = torch.tensor([digits])
    encoded = model.encode(source, key_padding([len(digits)]))
    caches = KVCache(capacity=9), KVCache()
    token, found = torch.tensor([[10]]), []
    for step in range(9):
        x = model.embed(token, start=step)
        token = model.decode(x, encoded, causal(), cross_length([len(digits)]), caches).argmax(-1)
        if token.item() == 11:
            break
        found.append(token.item())
    return found


for digits in ([1, 2, 3], [4, 0, 0, 1, 7], [9, 8, 7, 6, 5, 4]):
    print(digits, "->", reverse(digits))

# %%
# Where does the model attend?
# ----------------------------
# The weights of cross-attention, averaged over the heads. Each row is the token that the decoder has just read, and it attends
# to the digit that comes next.

digits = [4, 0, 0, 1, 7]
target = torch.tensor([[10, *digits[::-1]]])
with torch.no_grad():
    layer, encoded = model.decoder, model.encode(torch.tensor([digits]), None)
    x = model.embed(target)
    x = x + layer.attend(layer.norms[0](x), causal())
    weights = layer.cross.attention_weights(layer.norms[1](x), context=encoded)
plot_scores(weights, tokens=["begin", *map(str, digits[::-1])], kv_tokens=list(map(str, digits)), title="cross-attention")

# %%
# Is the padding really masked out?
# ---------------------------------
# :func:`~flexmask.testing.assert_no_leak` changes what each mask hides and compares the outputs to the last bit. It takes the
# mask of cross-attention, and that of the decoder as ``self_mask``. Without the mask, it finds the leak.

source, lengths, target = batch(3)
mask, cross_mask = causal() & key_padding(lengths + 1), cross_length(lengths)
context = model.embed(source).detach()
x = model.embed(target[:, :-1]).detach()


def translate(x, context):
    return model.decode(x, model.encoder(context, key_padding(lengths)), mask, cross_mask)


assert_no_leak(translate, cross_mask, x, context=context, self_mask=mask)


def translate_without(x, context):
    return model.decode(x, model.encoder(context, None), mask, cross_mask)


try:
    assert_no_leak(translate_without, cross_mask, x, context=context, self_mask=mask)
except AssertionError as error:
    print(error)

# %%
# The encoder without its mask attends to the padding of the source, and through it the padding reaches the decoder, although
# the cross-attention itself is masked. ``examples/translate.py`` in the repository is a larger model of this kind, with several
# layers.
