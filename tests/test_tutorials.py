"""What the common attention tutorials build, on this library: their settings, and the numbers that they print.

Each result is compared with plain PyTorch written here: dense scores, hidden ones set to -inf, softmax. Padding hides the
columns of the keys; the rows of padded queries still attend to the real keys.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

import pytest
import torch
from torch import Tensor

import flexmask as fm
from flexmask import Mask, MultiheadFlexAttention, attention, causal, cross_length, key_padding

LENGTHS = [3, 5, 4]
ENGLISH, FRENCH = [3, 5, 4], [7, 6, 2]

#: Six words of three numbers each.
JOURNEY = torch.tensor(
    [
        [0.43, 0.15, 0.89],
        [0.55, 0.87, 0.66],
        [0.57, 0.85, 0.64],
        [0.22, 0.58, 0.33],
        [0.77, 0.25, 0.10],
        [0.05, 0.80, 0.55],
    ]
)


# ---------------------------------------------------------------- plain PyTorch


def keep_mask(lengths: Sequence[int], longest: int) -> Tensor:
    """True for the real tokens, bool [B, longest]."""
    return torch.tensor([[place < length for place in range(longest)] for length in lengths])


def past(length: int) -> Tensor:
    """True for a key that is not after the query, bool [length, length]."""
    return torch.tensor([[key <= query for key in range(length)] for query in range(length)])


def softmax_rows(scores: Tensor, visible: Tensor) -> Tensor:
    return torch.softmax(scores.masked_fill(~visible, -math.inf), dim=-1)


def project(module: MultiheadFlexAttention, x: Tensor, part: int) -> Tensor:
    """The queries (0), keys (1) or values (2) of a module, [B, H, length, d_head], head by head."""
    rows = slice(part * module.d_out, (part + 1) * module.d_out)
    projected = x @ module.in_proj.weight[rows].T
    if module.in_proj.bias is not None:
        projected = projected + module.in_proj.bias[rows]
    return torch.stack(projected.split(module.d_out // module.n_heads, dim=-1), dim=1)


def plain(module: MultiheadFlexAttention, x: Tensor, visible: Tensor, context: Tensor | None = None) -> Tensor:
    """What a module should give; `visible` broadcasts to [B, H, q_len, kv_len]."""
    context = x if context is None else context
    query, key, value = project(module, x, 0), project(module, context, 1), project(module, context, 2)
    scores = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])
    heads = softmax_rows(scores, visible) @ value
    return torch.cat(heads.unbind(dim=1), dim=-1) @ module.out_proj.weight.T + module.out_proj.bias


def weights_of(scores: Tensor, mask: Mask | str | None) -> Tensor:
    """The softmax rows of given scores [q_len, kv_len]: keys and values are unit vectors, so attention shows its weights."""
    unit = torch.eye(scores.shape[-1], dtype=scores.dtype)[None, None]
    return attention(scores[None, None], unit, unit, mask, scale=1.0)[0, 0]


def check(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def check_printed(found: Tensor, printed: object, digits: int = 4) -> None:
    torch.testing.assert_close(found, torch.tensor(printed, dtype=found.dtype), rtol=0, atol=0.6 * 10**-digits)


def module_of(width: int, heads: int, bias: bool = False) -> MultiheadFlexAttention:
    return MultiheadFlexAttention(width, width, heads, bias=bias).double()


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


# ---------------------------------------------------------------- attention without a mask


def test_attention_of_the_inputs_themselves() -> None:
    """No projections: 4 sequences of 64 tokens with 128 dimensions, one head."""
    x = random(4, 64, 128)
    expected = torch.softmax(x @ x.transpose(1, 2) / 128**0.5, dim=-1) @ x
    check(attention(x[:, None], x[:, None], x[:, None])[:, 0], expected)


def test_weights_of_the_simple_example() -> None:
    printed = [
        [0.2098, 0.2006, 0.1981, 0.1242, 0.1220, 0.1452],
        [0.1385, 0.2379, 0.2333, 0.1240, 0.1082, 0.1581],
        [0.1390, 0.2369, 0.2326, 0.1242, 0.1108, 0.1565],
        [0.1435, 0.2074, 0.2046, 0.1462, 0.1263, 0.1720],
        [0.1526, 0.1958, 0.1975, 0.1367, 0.1879, 0.1295],
        [0.1385, 0.2184, 0.2128, 0.1420, 0.0988, 0.1896],
    ]
    words, unit = JOURNEY[None, None], torch.eye(6)[None, None]
    check_printed(attention(words, words, unit, scale=1.0)[0, 0], printed)


def test_context_vectors_of_the_simple_example() -> None:
    printed = [
        [0.4421, 0.5931, 0.5790],
        [0.4419, 0.6515, 0.5683],
        [0.4431, 0.6496, 0.5671],
        [0.4304, 0.6298, 0.5510],
        [0.4671, 0.5910, 0.5266],
        [0.4177, 0.6503, 0.5645],
    ]
    words = JOURNEY[None, None]
    check_printed(attention(words, words, words, scale=1.0)[0, 0], printed)


def test_trainable_weights_then_one_causal_head() -> None:
    """The printed outputs of two modules that draw their weights one after the other from seed 123."""
    torch.manual_seed(123)
    query, key, value = ((JOURNEY @ torch.rand(3, 2))[None, None] for _ in range(3))
    printed = [
        [0.2996, 0.8053],
        [0.3061, 0.8210],
        [0.3058, 0.8203],
        [0.2948, 0.7939],
        [0.2927, 0.7891],
        [0.2990, 0.8040],
    ]
    check_printed(attention(query, key, value)[0, 0], printed)

    query, key, value = (torch.nn.Linear(3, 2, bias=False)(JOURNEY)[None, None] for _ in range(3))
    printed = [
        [0.4772, 0.1063],
        [0.6007, 0.3485],
        [0.6293, 0.4037],
        [0.5499, 0.3662],
        [0.5331, 0.3455],
        [0.5087, 0.3554],
    ]
    # This one multiplies the scores by the root of the head size, where attention usually divides.
    check_printed(attention(query, key, value, causal(), scale=math.sqrt(2))[0, 0], printed)


@pytest.mark.parametrize(("width", "heads"), [(9, 1), (9, 3)])
def test_self_attention_without_a_mask(width: int, heads: int) -> None:
    module, x = module_of(width, heads), random(3, 8, width)
    out = module(x)
    assert out.shape == (3, 8, width)
    check(out, plain(module, x, torch.tensor(True)))


# ---------------------------------------------------------------- padding


@pytest.mark.parametrize("mask", [key_padding(LENGTHS), "key_padding(lengths=[3, 5, 4])"])
def test_padding_from_lengths(mask: Mask | str) -> None:
    module, x = module_of(9, 3), random(3, 5, 9)
    keep = keep_mask(LENGTHS, 5)
    assert keep.tolist() == [[True] * 3 + [False] * 2, [True] * 5, [True] * 4 + [False]]
    check(module(x, mask), plain(module, x, keep[:, None, None, :]))


def test_padded_queries_attend_to_real_keys() -> None:
    module, x = module_of(9, 3), random(3, 5, 9)
    out = module(x, key_padding(LENGTHS))
    alone = module(x[:1, :3])
    check(out[:1, :3], alone)
    assert not torch.equal(out[0, 3], out[0, 4])
    changed = x.clone()
    changed[0, 1] += 1
    assert (module(changed, key_padding(LENGTHS))[0, 3:] - out[0, 3:]).abs().min() > 0


KEEP = torch.tensor([1, 1, 1, 1, 0, 0]).bool()
FOUR_OF_SIX = [[True, True, True, True, False, False]] * 6


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("keep", [KEEP, KEEP[None]], ids=["[S]", "[B, S]"])
def test_padding_from_a_keep_mask(keep: Tensor, heads: int) -> None:
    """The last two of six columns are hidden, in every row and every head."""
    mask = key_padding(keep=keep)
    assert mask.dense(6).tolist() == [[FOUR_OF_SIX]]
    scores, unit = torch.rand(1, heads, 6, 6, dtype=torch.float64), torch.eye(6, dtype=torch.float64)
    unit = unit.expand(1, heads, 6, 6)
    weights = attention(scores, unit, unit, mask, scale=1.0)
    check(weights, softmax_rows(scores, torch.tensor(FOUR_OF_SIX)))
    assert torch.equal(weights[..., 4:], torch.zeros(1, heads, 6, 2))
    assert (weights[..., :4] > 0).all()


SCORES = torch.tensor([[7.0, -8.0, 6.0], [-3.0, 2.0, 4.0], [1.0, 6.0, -2.0]])


def test_softmax_rows_of_the_worked_example() -> None:
    found = weights_of(SCORES, None)
    check_printed(found, [[0.73, 0.0000002, 0.27], [0.0008, 0.12, 0.88], [0.007, 0.99, 0.003]], digits=2)
    check_printed(found[1, :1], [0.0008])


def test_softmax_rows_with_the_third_token_padded() -> None:
    found = weights_of(SCORES, key_padding(2))
    check_printed(found, [[1, 0, 0], [0.0067, 0.9933, 0], [0.0067, 0.9933, 0]])
    assert not found[:, 2].any()


def test_softmax_rows_of_the_causal_worked_example() -> None:
    found = weights_of(SCORES, causal())
    check_printed(found[:2], [[1, 0, 0], [0.0067, 0.9933, 0]])
    check_printed(found[2], [0.007, 0.99, 0.003], digits=2)
    assert not found.triu(1).any()


# ---------------------------------------------------------------- causal


def test_masked_softmax_rows() -> None:
    scores = torch.tensor(
        [
            [0.1921, 0.1646, 0.1652, 0.1550, 0.1721, 0.1510],
            [0.2041, 0.1659, 0.1662, 0.1496, 0.1665, 0.1477],
            [0.2036, 0.1659, 0.1662, 0.1498, 0.1664, 0.1480],
            [0.1869, 0.1667, 0.1668, 0.1571, 0.1661, 0.1564],
            [0.1830, 0.1669, 0.1670, 0.1588, 0.1658, 0.1585],
            [0.1935, 0.1663, 0.1666, 0.1542, 0.1666, 0.1529],
        ]
    )
    printed = [
        [1.0000, 0.0000, 0.0000, 0.0000, 0.0000, 0.0000],
        [0.5095, 0.4905, 0.0000, 0.0000, 0.0000, 0.0000],
        [0.3417, 0.3291, 0.3292, 0.0000, 0.0000, 0.0000],
        [0.2544, 0.2493, 0.2493, 0.2469, 0.0000, 0.0000],
        [0.2030, 0.1997, 0.1997, 0.1981, 0.1995, 0.0000],
        [0.1712, 0.1666, 0.1666, 0.1646, 0.1666, 0.1644],
    ]
    found = weights_of(scores, "causal")
    check_printed(found, printed)
    assert not found.triu(1).any()


def test_causal_with_the_last_four_of_eight_padded() -> None:
    printed = """
        1 0 0 0 0 0 0 0
        1 1 0 0 0 0 0 0
        1 1 1 0 0 0 0 0
        1 1 1 1 0 0 0 0
        1 1 1 1 0 0 0 0
        1 1 1 1 0 0 0 0
        1 1 1 1 0 0 0 0
        1 1 1 1 0 0 0 0
    """
    rows = [[cell == "1" for cell in line.split()] for line in printed.strip().splitlines()]
    by_length = causal() & key_padding(4)
    by_keep = causal() & key_padding(keep=torch.tensor([1, 1, 1, 1, 0, 0, 0, 0]).bool())
    assert by_length.dense(8).tolist() == [[rows]]
    assert by_keep.dense(8).tolist() == [[rows]]


@pytest.mark.parametrize("mask", [causal(), causal() & key_padding(LENGTHS)], ids=["causal", "causal and padding"])
def test_causal_self_attention(mask: Mask) -> None:
    module, x = module_of(9, 3), random(3, 5, 9)
    visible = past(5) & (keep_mask(LENGTHS, 5)[:, None, None, :] if mask != causal() else True)
    out = module(x, mask)
    check(out, plain(module, x, visible))
    changed = x.clone()
    changed[:, 3:] += 1
    assert torch.equal(module(changed, mask)[:, :3], out[:, :3])


def test_multi_head_causal_module() -> None:
    """Two sequences of 10 tokens, width 16, 4 heads, with biases."""
    module, x = module_of(16, 4, bias=True), random(2, 10, 16)
    assert module.in_proj.bias.shape == (48,)
    out = module(x, causal())
    assert out.shape == (2, 10, 16)
    check(out, plain(module, x, past(10)))


# ---------------------------------------------------------------- two sequences


def test_cross_attention() -> None:
    """French sequences of 7, 6 and 2 tokens attend to English ones of 3, 5 and 4; so does the padding among the French."""
    module, english, french = module_of(18, 3), random(3, 5, 18), random(3, 7, 18)
    out = module(french, cross_length(ENGLISH), context=english)
    assert out.shape == (3, 7, 18)
    check(out, plain(module, french, keep_mask(ENGLISH, 5)[:, None, None, :], english))
    check(module(french, key_padding(ENGLISH), context=english), out)


def test_cross_attention_with_hidden_query_rows() -> None:
    module, english, french = module_of(18, 3), random(3, 5, 18), random(3, 7, 18)
    out = module(french, cross_length(ENGLISH, q_lengths=FRENCH), context=english)
    real = keep_mask(FRENCH, 7)
    expected = plain(module, french, keep_mask(ENGLISH, 5)[:, None, None, :], english)
    check(out[real], expected[real])
    check(out[~real], module.out_proj.bias.expand_as(out[~real]))


def test_one_module_for_encoder_decoder_and_cross_attention() -> None:
    english, french = random(3, 5, 9), random(3, 7, 9)
    english_keys, french_keys = (keep_mask(n, max(n))[:, None, None, :] for n in (ENGLISH, FRENCH))
    encoder, decoder, cross = (module_of(9, 3) for _ in range(3))

    encoded = encoder(english, key_padding(ENGLISH))
    check(encoded, plain(encoder, english, english_keys))
    decoded = decoder(french, causal() & key_padding(FRENCH))
    check(decoded, plain(decoder, french, past(7) & french_keys))
    crossed = cross(decoded, cross_length(ENGLISH), context=encoded)
    check(crossed, plain(cross, decoded, english_keys, encoded))
    assert crossed.shape == (3, 7, 9)

    crossed.sum().backward()
    for module in (encoder, decoder, cross):
        assert all(cast(Tensor, weight.grad).isfinite().all() for weight in module.parameters())


# ---------------------------------------------------------------- FlexAttention


@pytest.mark.slow
@pytest.mark.exhaustive
def test_flex_module_for_causal_attention_on_padded_inputs() -> None:
    """A BlockMask goes into the module, the queries and keys come back for a picture of the scores."""
    lengths, longest = [90, 140, 33], 140
    module, x = MultiheadFlexAttention(24, 32, 2), torch.randn(3, longest, 24)
    mask = causal() & key_padding(lengths)
    block_mask = mask.block_mask(longest)
    with torch.no_grad():
        out, queries, keys = module(x, block_mask, return_qk=True)
    assert out.shape == (3, longest, 32)
    assert queries.shape == keys.shape == (3, 2, longest, 16)

    double = MultiheadFlexAttention(24, 32, 2).double()
    double.load_state_dict(module.state_dict())
    expected = plain(double, x.double(), past(longest) & keep_mask(lengths, longest)[:, None, None, :])
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(queries.double(), project(double, x.double(), 0), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(keys.double(), project(double, x.double(), 1), rtol=1e-5, atol=1e-5)


def test_queries_and_keys_give_the_masked_scores() -> None:
    module, x = module_of(16, 4), random(3, 5, 16)
    mask = causal() & key_padding(LENGTHS)
    out, queries, keys = module(x, mask, return_qk=True)
    check(out, module(x, mask))
    visible = past(5) & keep_mask(LENGTHS, 5)[:, None, None, :]
    assert torch.equal(mask.dense(5), visible)
    check(queries @ keys.transpose(-2, -1), project(module, x, 0) @ project(module, x, 1).transpose(-2, -1))


def test_the_tutorials_masks_have_a_text_form() -> None:
    for mask in (causal() & key_padding(LENGTHS), cross_length(ENGLISH, q_lengths=FRENCH), key_padding(keep=KEEP.tolist())):
        assert fm.parse(str(mask)) == mask
