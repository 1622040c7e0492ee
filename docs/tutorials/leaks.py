"""
Testing a model for leaks
=========================

A model leaks where an output depends on a token that its mask should hide. Its loss is then too good, and nothing fails. This
tutorial finds leaks in models with :func:`flexmask.testing.assert_no_leak`, for any implementation of attention, and shows the
other assertions of :mod:`flexmask.testing`.
"""

import torch
import torch.nn.functional as F
from torch import nn

from flexmask import MultiheadFlexAttention, causal, document, key_padding
from flexmask.testing import assert_equivalent, assert_no_leak, assert_subset

torch.manual_seed(0)

# %%
# One layer
# ---------
# The check is exact. It sets hidden positions to large random values and compares outputs to the last bit, and it compares the
# gradient of each output with 0. A layer that is right passes silently:

mask = causal() & document(lengths=[5, 3])
layer = MultiheadFlexAttention(16, 16, 2)
assert_no_leak(lambda x: layer(x, mask), mask, torch.randn(1, 8, 16))
mask.plot(8)

# %%
# The function is called with the input alone, and the check gives it no mask. So the lambda makes the call that your code makes:
# where that call forgets the mask, the check finds it.
#
# The check compares the model with the mask that you give. If the model has the same wrong mask, the check passes. So write the
# mask of the check in another way than the model's, for example as lengths where the model has ids. Look at it once, in the
# picture above or in the terminal with ``mask.show(8)``.
#
# Any function can be checked, also one that has nothing to do with flexmask. This one forgot the documents:


def attend(x):
    return F.scaled_dot_product_attention(x, x, x, is_causal=True)


def report(function, *arguments, **options):
    try:
        assert_no_leak(function, *arguments, **options)
        print("no leak")
    except AssertionError as error:
        print(error)


report(attend, mask, torch.randn(1, 8, 16))

# %%
# A row of the picture is an output, a column the input that changes. ``!`` marks each leak, and the message names the part of
# the mask that should have hidden it.
#
# torch.nn.MultiheadAttention
# ---------------------------
# In ``torch.nn.MultiheadAttention`` True means "masked out", in flexmask and in ``scaled_dot_product_attention`` it means
# "attend". A wrong polarity is a common leak. Here a tokenizer gave True for the 4 real tokens of 6:

torch_layer = nn.MultiheadAttention(16, 2, batch_first=True).eval()
real = torch.tensor([[True, True, True, True, False, False]])
report(lambda x: torch_layer(x, x, x, key_padding_mask=real)[0], key_padding(keep=real), torch.randn(1, 6, 16))

# %%

report(lambda x: torch_layer(x, x, x, key_padding_mask=~real)[0], key_padding(keep=real), torch.randn(1, 6, 16))

# %%
# A whole model
# -------------
# A model takes tokens, and often the lengths of the sequences, from which it makes its masks. Most leaks are not in attention:
# with ``leaks=True`` this model has the right mask in both layers, and a normalization over the sequence, which mixes all tokens.


class Model(nn.Module):
    def __init__(self, leaks):
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.layers = nn.ModuleList(MultiheadFlexAttention(16, 16, 2) for _ in range(2))
        self.leaks = leaks

    def forward(self, tokens, lengths):
        mask = causal() & key_padding(lengths)
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer(x, mask)
            if self.leaks:
                x = x - x.mean(1, keepdim=True)
        return x


tokens, lengths = torch.randint(0, 50, (2, 8)), torch.tensor([8, 5])
wanted = causal() & key_padding(keep=torch.arange(8) < lengths[:, None])
for leaks in (False, True):
    model = Model(leaks).eval()
    report(lambda tokens, model=model: model(tokens, lengths), wanted, tokens, layers=2)

# %%
# Tokens are replaced by other tokens of the input. ``layers=2`` is for a model of two layers: information may pass twice. With
# ``sliding_window(size=4)`` two layers reach 6 tokens back. Where more layers could pass all pairs that leak, the message says
# how many. For layers with different masks give a list of masks.
#
# The check runs the model for each hidden position, so use short sequences: a leak shows at 8 tokens as well as at 8,000.
#
# Masks and attention
# -------------------
# ``assert_equivalent`` compares all lowerings of a mask, and attention with its gradients, with a reference. ``assert_subset``
# checks that one mask shows nothing that another hides.

assert_equivalent(mask, 8, reference=lambda b, h, q, kv: (kv <= q) & ((q < 5) == (kv < 5)))
assert_subset(mask, causal(), 8)
try:
    assert_subset(key_padding(lengths=[4]), causal(), 8)
except AssertionError as error:
    print(error)

# %%
# The same bits in every packing
# ------------------------------
# Sums in floating point depend on their order, so a packed document may differ from the document alone in its last bits. Where
# it must not, :func:`~flexmask.testing.assert_batch_invariant` compares the bits, and :func:`flexmask.lowering.align_documents`
# lays the documents out so that FlexAttention adds in the same order.
#
# In pytest
# ---------
# Where pytest is installed (``pip install pytest``), each assertion is a fixture, and ``pytest --flexmask-device cuda`` runs them
# on a GPU::
#
#     def test_my_model(assert_no_leak):
#         model, lengths = Model().eval(), torch.tensor([8, 5])
#         assert_no_leak(lambda tokens: model(tokens, lengths), causal() & key_padding(lengths), tokens, layers=2)
#
# For the models of Hugging Face Transformers, the plugin flexmask-transformers has ``check_packing``, which packs documents in
# each way that Transformers knows and reports which of them leak.
