"""Bad input: each is refused with an error of the library's own, whose message names the value and the remedy."""

import re
from collections.abc import Callable
from typing import Any, TypeAlias, cast

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import flexmask
from flexmask.errors import FlexmaskError

# Any, since the tests misuse them on purpose
fm: Any = flexmask
b, h, kv, q = fm.b, fm.h, fm.kv, fm.q

Attempt: TypeAlias = Callable[[], Any]
Row: TypeAlias = tuple[str, Attempt, str]

META = torch.device("meta")
SYSTEM = fm.table(torch.tensor([[True, False]]))


def ragged() -> Any:
    """A mask of three sequences."""
    return fm.key_padding([3, 5, 4])


def on(device: torch.device) -> Any:
    return fm.document(torch.zeros(6, dtype=torch.long, device=device))


# Each row: a name, what is tried, and what the message must hold (in any order, separated by " ... ").


def sdpa(x: torch.Tensor, mask: Any) -> torch.Tensor:
    return torch.nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=mask)


OPERATORS: list[Row] = [
    ("and", lambda: fm.causal() and fm.full(), "a & b"),
    ("or", lambda: fm.causal() or fm.full(), r"a \| b"),
    ("not", lambda: not fm.causal(), "~a"),
    ("and where a mask is taken", lambda: fm.testing.assert_equivalent(fm.causal() and fm.full(), 6), "a & b"),
    ("and of lowered masks", lambda: fm.plan("causal", 4)() and fm.plan("full", 4)(), "LoweredMask ... `and` ... plan.mask"),
    ("and in text", lambda: fm.parse("causal and full"), "write a & b for `a and b`"),
    ("if", lambda: 1 if fm.causal() else 2, "causal ... truth value"),
    ("chained comparison", lambda: 0 <= q - kv < 3, "chained ... &"),
    ("forgotten parentheses", lambda: kv <= q & q - kv < 3, "parentheses ... &"),
    ("forgotten parentheses around a mask", lambda: fm.causal() & kv < 3, "parentheses|Compare ... &"),
    ("forgotten parentheses, or", lambda: fm.causal() | kv == 3, r"parentheses ... \|"),
    ("forgotten parentheses around data", lambda: fm.causal() & SYSTEM[b, q] == 1, "^comparisons bind less tightly than &"),
    ("mask == index", lambda: fm.causal() == SYSTEM[b, kv], r"^== binds less tightly than & and \| ... causal & \(x == <bool"),
    ("mask != index", lambda: fm.causal() != q, "parentheses"),
    ("lookup == True", lambda: SYSTEM[b, kv] == True, r"write <bool\[1, 2\]>\[b, kv\] == 1, not True$"),  # noqa: E712
    ("index != False", lambda: q != False, "write q != 0, not False$"),  # noqa: E712
    ("mask & function", lambda: fm.full() & fm.causal, r"the function causal: call it, causal\(\)$"),
    ("mask & number", lambda: fm.causal() & 1, "& ... int 1"),
    ("mask & tensor", lambda: fm.causal() & torch.ones(2, 2, dtype=torch.bool), "& ... dense"),
    ("tensor & mask", lambda: torch.ones(2, 2, dtype=torch.bool) & fm.causal(), "& ... dense"),
    ("mask - number", lambda: fm.causal() - 3, "- ... int 3"),
    ("index & index", lambda: q & kv, "& ... parentheses"),
    ("~index", lambda: ~q, "~ ... Compare"),
    ("index as a truth value", lambda: bool(q), "q ... == 0"),
    ("index / 2", lambda: q / 2, "// ... 2"),
    ("index + float", lambda: q + 0.5, "float 0.5"),
    ("index < float", lambda: q < 2.5, "float 2.5"),
    ("index + bool", lambda: q + True, "integer ... True: write 1$"),
    ("index == None", lambda: q == None, "None"),  # noqa: E711
    ("index < mask", lambda: q < fm.causal(), "parentheses|mask"),
    ("index // 0", lambda: q // 0, "zero"),
    ("index % 0", lambda: q % 0, "zero"),
    ("sum // 0", lambda: (q - kv) // 0, r"\(q - kv\) // 0 divides by zero"),
    ("index + tensor", lambda: q + torch.tensor([1, 2]), r"table\("),
    ("tensor[index]", lambda: torch.zeros(2, 6)[b, q], r"tensor ... flexmask.table\(tensor\)\[b, q\]"),
    ("tensor[index, slice]", lambda: torch.zeros(2, 6)[q, :], r"flexmask.table\(tensor\)\[q, :"),
    ("torch.abs", lambda: torch.abs(q - kv), r"abs takes tensors ... Write abs\(q - kv\)"),
    ("torch.minimum", lambda: torch.minimum(q, torch.tensor(3)), r"Write flexmask.minimum\(q, tensor\)"),
    ("torch.where", lambda: torch.where(fm.causal(), q, 0), r"Write flexmask.where\(causal, q, 0\)"),
    ("torch.logical_not", lambda: torch.logical_not(fm.causal()), r"Write ~\(causal\)"),
    (
        "SDPA",
        lambda: sdpa(torch.zeros(1, 1, 4, 2), fm.causal()),
        r"takes a tensor, not a mask ... attn_mask=mask.dense\(q_len, kv_len\), or flexmask.attention\(",
    ),
    ("masked_fill", lambda: torch.zeros(4, 4).masked_fill(cast(Any, fm.causal()), 0), r"masked_fill\(~mask.dense\("),
    ("torch.where by name", lambda: torch.where(input=q, condition=fm.causal(), other=0), r"where ... flexmask.where\(\)"),
    ("torch.sin", lambda: torch.sin(q), r"sin takes tensors ... from_mask_mod\(mask_mod\)"),
    ("torch.nn.functional.relu of a table", lambda: torch.relu(fm.table([1])), "relu takes tensors"),
    ("index + list", lambda: q + [1, 2], r"list ... table\("),  # noqa: RUF005
    ("where without a mask", lambda: fm.where(q, fm.causal(), fm.full()), "q ... compare"),
    ("where of two kinds", lambda: fm.where(fm.causal(), q, fm.full()), "two masks"),
]

DATA: list[Row] = [
    ("float ids", lambda: fm.document([0.0, 1.0]), r"document ... 0\.0"),
    ("float tensor of ids", lambda: fm.document(torch.tensor([0.0, 1.0])), r"document ... float32 ... \.long\(\)"),
    ("float array of ids", lambda: fm.document(np.array([0.0])), "document ... float64 ... astype"),
    ("text as ids", lambda: fm.document("01"), "document ... 01"),
    ("truth values as ids", lambda: fm.document([True, False]), "document ... integers"),
    ("float lengths", lambda: fm.key_padding([3.0, 2.0]), r"key_padding ... lengths ... 3\.0"),
    ("float length", lambda: fm.key_padding(2.5), r"key_padding ... lengths ... 2\.5"),
    ("float tensor of lengths", lambda: fm.key_padding(torch.tensor([3.0])), "key_padding ... float32 ... long"),
    ("truth values as lengths", lambda: fm.key_padding([True, False]), "key_padding ... keep="),
    ("negative length", lambda: fm.key_padding([3, -2]), "key_padding ... lengths ... -2"),
    ("negative single length", lambda: fm.query_padding(-1), "query_padding ... lengths ... -1"),
    ("negative kv_lengths", lambda: fm.cross_length([-3]), "cross_length ... kv_lengths ... -3"),
    ("negative q_lengths", lambda: fm.cross_length([3], q_lengths=[-4]), "cross_length ... q_lengths ... -4"),
    ("negative prefix", lambda: fm.prefix_lm([-1]), "prefix_lm ... -1"),
    ("negative document lengths", lambda: fm.document(lengths=[3, -1]), "document ... lengths ... -1"),
    ("lengths with two axes", lambda: fm.key_padding([[1], [2]]), r"key_padding ... lengths ... \[2, 1\]"),
    ("ids with three axes", lambda: fm.document([[[0]]]), r"document ... ids ... \[1, 1, 1\]"),
    (
        "lengths with three axes",
        lambda: fm.document(lengths=[[[3]]]),
        r"axes \[documents\] or \[batch, documents\] ... \[1, 1, 1\]",
    ),
    ("offsets with three axes", lambda: fm.document(cu_seqlens=[[[0, 3]]]), r"\[documents \+ 1\] or \[batch, documents \+ 1\]"),
    (
        "a list of tensors as ids",
        lambda: fm.document([torch.tensor([0, 1]), torch.tensor([1, 1])]),
        r"ids ... a list with Tensor int64\[2\]: take torch.stack\(list\)$",
    ),
    (
        "a list of tensors of two lengths",
        lambda: fm.document(lengths=[torch.tensor([3, 1]), torch.tensor([4])]),
        r"lengths ... torch.stack\(list\), after padding all of them to one length$",
    ),
    (
        "a list of tensors as keep",
        lambda: fm.key_padding(keep=[torch.tensor([True, False])]),
        r"keep ... bool\[2\]: take torch.stack\(",
    ),
    ("a list of tensors to bind", lambda: fm.parse("document(ids)").bind(ids=[torch.tensor([0, 1])]), r"torch.stack\(list\)"),
    ("a list of arrays", lambda: fm.document([np.array([0, 1]), np.array([1, 1])]), r"ids ... take numpy.stack\(list\)$"),
    (
        "keep of Transformers",
        lambda: fm.key_padding(keep=torch.ones(2, 1, 1, 6, dtype=torch.bool)),
        r"keep ... \[S\] or \[B, S\], got shape \[2, 1, 1, 6\]: take tensor\[:, 0, 0\]$",
    ),
    ("keep with three axes", lambda: fm.query_padding(keep=torch.ones(2, 1, 6, dtype=torch.long)), r"take tensor\[:, 0\]$"),
    (
        "keep with a value for each cell",
        lambda: fm.key_padding(hide=torch.ones(2, 1, 6, 6, dtype=torch.bool)),
        r"hide ... give from_dense\(tensor\)$",
    ),
    (
        "offsets as lengths",
        lambda: fm.document(lengths=[0, 4, 7, 12]).dense(12),
        "lengths cover 23 tokens, but there are 12 positions. They begin with 0 and rise: did you mean cu_seqlens=",
    ),
    ("too many lengths", lambda: fm.document(lengths=[4, 7, 12]).dense(12), "there are 12 positions$"),
    ("ids without axes", lambda: fm.document(3), "document ... ids"),
    (
        "ragged ids",
        lambda: fm.document([[0, 1], [0]]),
        "document ... uneven ... lengths of documents with 0",
    ),
    ("ragged table", lambda: fm.table([[0, 1], [0]]), "table ... uneven ... Pad"),
    ("no ids", lambda: fm.document([]), "document ... no values"),
    ("no lengths", lambda: fm.key_padding(torch.zeros(0, dtype=torch.long)).dense(4), "key_padding ... no values"),
    ("document without a source", lambda: fm.document(), "one of ... ids ... lengths ... cu_seqlens ... position_ids"),
    ("document with two sources", lambda: fm.document([0, 1], lengths=[1, 1]), "one of ... ids ... lengths"),
    ("document kv_ids alone", lambda: fm.document(kv_ids=[0, 1]), "ids"),
    ("cu_seqlens unsorted", lambda: fm.document(cu_seqlens=[0, 5, 3]).dense(6), "cu_seqlens ... 5, 3|3"),
    ("cu_seqlens not from 0", lambda: fm.document(cu_seqlens=[1, 3]).dense(4), "cu_seqlens ... 0 ... 1"),
    (
        "cu_seqlens tensor unsorted",
        lambda: fm.document(cu_seqlens=torch.tensor([0, 5, 3])).dense(6),
        "cu_seqlens ... 3",
    ),
    ("cu_seqlens tensor not from 0", lambda: fm.document(cu_seqlens=torch.tensor([2, 3])).dense(6), "cu_seqlens ... 2"),
    ("key_padding without data", lambda: fm.key_padding(), "lengths ... keep"),
    ("key_padding with both", lambda: fm.key_padding([1], keep=[[True]]), "lengths ... keep"),
    ("key_padding side", lambda: fm.key_padding([1], side="top"), "side ... top ... right ... left"),
    ("keep of other integers", lambda: fm.query_padding(keep=[1, 1, -1]), "query_padding ... keep ... 0 and 1 ... got -1"),
    ("hide of floats", lambda: fm.key_padding(hide=torch.zeros(4)), "hide ... float32 ... tensor != 0"),
    ("keep of integers", lambda: fm.key_padding(keep=[0, 1, 2]), "keep ... bool|truth"),
    ("keep and hide", lambda: fm.query_padding(keep=[True], hide=[False]), "query_padding ... keep and hide ... keep and hide"),
    ("hide of integers", lambda: fm.key_padding(hide=[0, 1, 2]), "hide ... bool ... padding"),
    ("hide with a side", lambda: fm.key_padding(hide=[True, False], side="left"), "hide ... side"),
    ("keep with a side", lambda: fm.key_padding(keep=[True, False], side="left"), "side ... keep"),
    ("causal misspelt", lambda: fm.causal(align="lower_rihgt"), "align ... lower_rihgt ... lower_right"),
    ("causal with a float", lambda: fm.causal(offset=0.5), r"float 0\.5"),
    ("window with a bare number", lambda: fm.sliding_window(3), "left ... right ... size"),
    ("window with two bare numbers", lambda: fm.sliding_window(256, 0), r"by name ... sliding_window\(left=256, right=0\)"),
    ("dilated window with bare numbers", lambda: fm.masks.dilated_window(4, 2, dilation=2), r"left=4, right=2, dilation=2\)"),
    ("offset of causal by position", lambda: fm.causal("upper_left", 3), "offset is given by name ... offset=3"),
    (
        "lengths of the queries by position",
        lambda: fm.cross_length([3, 2], [5, 4]),
        r"by position are kv_lengths; q_lengths is ... write cross_length\(kv_lengths=\[3, 2\], q_lengths=\[5, 4\]\)$",
    ),
    ("too many arguments", lambda: fm.masks.chunked(4, 1, 2, 3), r"chunked: too many ... chunked\(size"),
    ("misspelt argument", lambda: fm.causal(ofset=1), "ofset ... Did you mean offset"),
    (
        "misspelt argument that is required",
        lambda: fm.masks.in_context([0, 0, 1], test_starts=2),
        r"'test_start'. Did you mean test_start in place of test_starts\?",
    ),
    (
        "a part of the name of an argument that is required",
        lambda: fm.masks.multi_item(prefix=10, positions=[1, 2]),
        r"'prefix_length'. Did you mean prefix_length in place of prefix\?",
    ),
    ("window without anything", lambda: fm.sliding_window(), "left ... right ... size"),
    ("window with both forms", lambda: fm.sliding_window(left=1, right=1, size=3), "left ... right ... size"),
    ("window of negative distance", lambda: fm.sliding_window(left=-1, right=2), "left ... -1"),
    ("window of size 0", lambda: fm.sliding_window(size=0), "size ... 0"),
    ("window with a float", lambda: fm.sliding_window(left=1.5, right=2), r"left ... 1\.5"),
    ("dense of other integers", lambda: fm.from_dense([[1, 0], [0, 2]]), "dense ... True for visible, or of 0 and 1, got 2"),
    ("dense of floats", lambda: fm.from_dense(torch.zeros(2, 2)), r"dense ... float32 ... tensor == 0 ... tensor != 0"),
    (
        "additive padding for hide",
        lambda: fm.key_padding(hide=torch.zeros(2, 3)),
        "hide ... take tensor != 0, of an additive mask .-inf for padding. as of one of 0 and 1$",
    ),
    ("additive padding for keep", lambda: fm.key_padding(keep=torch.zeros(2, 3)), "keep ... tensor == 0 ... tensor != 0"),
    ("float lengths", lambda: fm.key_padding(torch.tensor([2.0, 3.0])), r"lengths ... torch.float32: take tensor.long\(\)$"),
    ("float ids", lambda: fm.document(torch.zeros(2, 3)), r"ids ... torch.float32: take tensor.long\(\)$"),
    (
        "a float table",
        lambda: fm.table(torch.zeros(2, 3)),
        r"table ... torch.float32: take tensor.long\(\) ... tensor > 0 ... score_mod$",
    ),
    ("| of a boolean table", lambda: fm.causal() | SYSTEM[b, kv], r"Compare it ... <bool\[1, 2\]>\[b, kv\] == 1\)"),
    ("a boolean table | a mask", lambda: SYSTEM[b, kv] | fm.causal(), r"<bool\[1, 2\]>\[b, kv\] == 1\)"),
    ("& of boolean tables", lambda: SYSTEM[b, kv] & SYSTEM[b, q], r"<bool\[1, 2\]>\[b, kv\] == 1\)"),
    ("not of a boolean table", lambda: ~SYSTEM[b, kv], r"Compare it first: ~\(<bool\[1, 2\]>\[b, kv\] == 1\)"),
    ("a boolean table as a truth value", lambda: bool(SYSTEM[b, kv]), r"<bool\[1, 2\]>\[b, kv\] == 1\)"),
    ("a boolean table in text", lambda: fm.parse("causal | table([True, False])[kv]"), r"\[kv\] == 1\)"),
    ("a table by name in text", lambda: fm.parse("causal | system[b, kv]"), r"\(system\[b, kv\] == 1\)"),
    ("dense with one axis", lambda: fm.from_dense([True, False]), r"dense ... \[2\]"),
    (
        "dense with five axes",
        lambda: fm.from_dense(torch.ones(1, 1, 1, 1, 1, dtype=torch.bool)),
        r"dense ... \[1, 1, 1, 1, 1\]",
    ),
    ("shift by a float", lambda: fm.masks.shift(fm.causal(), q=1.5), r"float 1\.5"),
    ("shift by two axes", lambda: fm.masks.shift(fm.causal(), q=[[1, 2]]), r"shift: q ... the batch; got shape \[1, 2\]"),
    ("shift by truth values", lambda: fm.masks.shift(fm.causal(), kv=[True]), "shift: kv must hold integers, got truth values$"),
    (
        "a parameter that is data",
        lambda: fm.parse("causal | (kv < prefix)").bind(prefix=torch.tensor([2, 3])),
        r"^prefix has the shape \[2\] ... as one number ... write prefix\[b\]",
    ),
    ("the same with a list", lambda: fm.parse("causal | (kv < prefix)").bind(prefix=[2, 3]), r"shape \[2\] ... prefix\[b\]"),
    (
        "a parameter that is data of each token",
        lambda: fm.parse("ids == 0").bind(ids=[[0, 1], [1, 1]]),
        r"^ids has the shape \[2, 2\] ... ids\[b, q\] or ids\[b, kv\]",
    ),
    (
        "data without indices",
        lambda: kv < fm.table([2, 3]),
        r"got the table table ... flexmask.table\(data\)\[b\]\.$",
    ),
    ("a mask as a number", lambda: q + fm.causal(), r"got the mask causal; flexmask.where\(mask, 1, 0\) makes a number of it$"),
    ("or for a default", lambda: fm.causal() or fm.full(), r"test whether a mask is given, write `mask is None`"),
    (
        "a window by position",
        lambda: fm.masks.sink_window(2, 6),
        r"left=6 \(keys before the query's own\) or size=6 \(keys in all, with the query's own\)$",
    ),
    (
        "trees of other sizes",
        lambda: fm.masks.tree(parents=[[-1, 0], [-1]]),
        "^tree: parents has lists of uneven lengths ... with -1, which are roots",
    ),
    ("shift without a mask", lambda: fm.masks.shift(q, q=1), "shift ... mask"),
    ("transpose without a mask", lambda: fm.masks.transpose([1]), "transpose ... mask"),
    ("per_head without masks", lambda: fm.per_head([]), "per_head ... mask"),
    ("per_head of a mask", lambda: fm.per_head(fm.causal()), "per_head ... list"),
    ("per_head with a stranger", lambda: fm.per_head([fm.causal(), 3]), "per_head ... 3"),
    ("per_document without a mask", lambda: fm.per_document(3, [0]), "per_document ... mask"),
    ("table of text", lambda: fm.table(["a"]), "str 'a'"),
    ("table of nothing", lambda: fm.table(None), "None"),
    ("table looked up with too few", lambda: fm.table([[1, 2]])[q], r"2 axes ... \[q\]; of data \[B, S\] write \[b, q\]"),
    ("tensor looked up with a slice", lambda: torch.ones(1, 2)[:, q], r"indexed with \[:, q\] ... table\(tensor\)\[b, q\]"),
    ("lengths as ids", lambda: fm.document([7, 4, 5]).dense(16), "document.ids=.7, 4, 5.. has 3 values ... lengths="),
    (
        "data by name that is short",
        lambda: fm.parse("ids[b, q] == ids[b, kv]", ids=torch.zeros(2, 5).long()).dense(6),
        r"<ids: int64\[2, 5\]>\[b, q\] has 5 values",
    ),
    ("too large an integer", lambda: fm.table([2**70]), "64"),
    ("parameter named as a symbol", lambda: fm.param("q"), "q ... symbol|name"),
    ("parameter named as a mask", lambda: fm.param("causal"), "causal ... mask|name"),
    ("parameter named as a keyword", lambda: fm.param("lambda"), "lambda ... keyword|identifier"),
    ("parameter's name", lambda: fm.param("a b"), "identifier ... a b"),
    ("parameter named by a number", lambda: fm.param(3), r"string, e.g. param\('ids'\), got int 3"),
    ("parameter named by nothing", lambda: fm.param(None), "string ... None"),
    ("parameter named by a mask", lambda: fm.param(fm.causal()), r"string ... causal\(\)"),
    (
        "parameter with a ligature",
        lambda: fm.param("\ufb01lter"),
        "reads the name 'ﬁlter' as 'filter'; name",
    ),
    ("parameter in fullwidth letters", lambda: fm.param("ｉds"), "as 'ids'"),
    ("steps without end", lambda: fm.masks.training_time_test(4, 10**30), "steps must be at most 1024"),
    ("bind of a number where there is none", lambda: fm.parse("kv < n").bind(n=None), "None"),
]

LOWERING: list[Row] = [
    (
        "names of create_block_mask",
        lambda: fm.causal().block_mask(Q_LEN=8, KV_LEN=8),
        "block_mask ... no argument Q_LEN: write q_len=",
    ),
    (
        "no length",
        lambda: fm.causal().dense(),
        r"^dense: missing a required argument: 'q_len'\. Its signature is dense\(q_len, kv_len=None",
    ),
    (
        "explain without a length",
        lambda: fm.explain(fm.causal()),
        r"^explain: missing .* 'q_len'\. Its signature is explain\(mask, q_len",
    ),
    ("misspelt argument of a method", lambda: fm.causal().stats(8, blocksize=4), r"'blocksize'. Did you mean block_size\?"),
    (
        "a size by position",
        lambda: fm.causal().rows(8, 8, 2, 4),
        r"given by name only: write rows\(q_len=8, kv_len=8, batch=2, heads=4\)",
    ),
    ("misspelt argument of a picture", lambda: fm.causal().show(8, token=[]), r"'token'. Did you mean tokens\?"),
    ("no value", lambda: fm.attention(torch.zeros(1, 1, 2, 2), torch.zeros(1, 1, 2, 2)), "attention: missing .* 'value'"),
    ("no heads", lambda: fm.MultiheadFlexAttention(8, 8), "^MultiheadFlexAttention: missing .* 'n_heads'"),
    (
        "heads by another name",
        lambda: fm.MultiheadFlexAttention(8, 8, num_heads=2),
        "^MultiheadFlexAttention has no argument num_h",
    ),
    ("batch as B", lambda: fm.causal().dense(8, B=2), "dense has no argument B: write batch="),
    (
        "batch of named data",
        lambda: ragged().dense(6, batch=2),
        r"2 by the query \(batch=2\) and 3 by key_padding\(lengths=\[3, 5, 4\]\)",
    ),
    ("q_len 0", lambda: fm.causal().dense(0), "q_len ... 0"),
    ("q_len negative", lambda: fm.causal().dense(-3), "q_len ... -3"),
    ("q_len float", lambda: fm.causal().dense(3.0), r"q_len ... 3\.0"),
    ("q_len True", lambda: fm.causal().dense(True), "q_len ... True"),
    ("q_len text", lambda: fm.causal().rows("3"), "q_len ... 3"),
    ("kv_len 0", lambda: fm.causal().rows(3, 0), "kv_len ... 0"),
    ("kv_len float", lambda: fm.causal().block_mask(3, 2.5), r"kv_len ... 2\.5"),
    ("batch 0", lambda: fm.causal().dense(3, batch=0), "batch ... 0"),
    ("heads negative", lambda: fm.causal().dense(3, heads=-1), "heads ... -1"),
    ("q_offset negative", lambda: fm.causal().dense(3, q_offset=-1), "q_offset ... -1"),
    ("q_offset float", lambda: fm.causal().dense(3, q_offset=1.5), r"q_offset ... 1\.5"),
    ("q_offset float tensor", lambda: fm.causal().dense(3, q_offset=torch.tensor([1.5])), "q_offset ... float32"),
    ("q_offset 2-d", lambda: fm.causal().dense(3, q_offset=torch.tensor([[1]])), r"q_offset ... \[1, 1\]"),
    ("q_offset for another batch", lambda: ragged().dense(6, q_offset=torch.tensor([1, 2])), "q_offset ... 2 ... 3"),
    ("block_size 0", lambda: fm.causal().block_mask(8, block_size=0), "block_size ... 0"),
    ("block_size of three", lambda: fm.causal().block_mask(8, block_size=(4, 2, 1)), "block_size ... a pair"),
    ("block_size negative", lambda: fm.causal().block_mask(8, block_size=(4, -2)), "block_size ... -2"),
    ("block_size float", lambda: fm.causal().block_mask(8, block_size=4.0), r"block_size ... 4\.0"),
    (
        "block_size of three",
        lambda: fm.causal().block_mask(8, block_size=(4, 4, 4)),
        "block_size ... 4, 4, 4",
    ),
    ("stats block_size", lambda: fm.causal().stats(8, block_size=0), "block_size ... 0"),
    ("form misspelt", lambda: fm.causal().mask_mod(8, form="intervals"), "form ... intervals ... interval"),
    ("length beyond the keys", lambda: ragged().dense(4), "key_padding ... lengths ... 5 ... 4"),
    ("length beyond the keys, rows", lambda: ragged().rows(4), "key_padding ... lengths ... 5 ... 4"),
    (
        "tensor length beyond",
        lambda: fm.key_padding(torch.tensor([3, 9])).dense(8),
        "key_padding ... lengths ... 9 ... 8",
    ),
    (
        "negative tensor length",
        lambda: fm.key_padding(torch.tensor([3, -9])).dense(8),
        "key_padding ... lengths ... -9",
    ),
    ("length beyond the queries", lambda: fm.query_padding([9]).dense(8), "query_padding ... lengths ... 9 ... 8"),
    ("cross_length beyond", lambda: fm.cross_length([9], q_lengths=[2]).dense(2, 8), "cross_length ... kv_lengths ... 9 ... 8"),
    (
        "cross_length without kv_len",
        lambda: fm.cross_length([9, 2]).dense(5),
        "kv_len = 5, got 9; ... q_len unless kv_len= is given, ... or context=",
    ),
    ("prefix beyond", lambda: fm.prefix_lm(9).dense(8), "prefix_lm ... 9 ... 8"),
    ("document lengths beyond", lambda: fm.document(lengths=[5, 5]).dense(8), "document ... lengths ... 10 ... 8"),
    ("cu_seqlens beyond", lambda: fm.document(cu_seqlens=[0, 10]).dense(8), "cu_seqlens ... 10 ... 8"),
    (
        "tree of other queries",
        lambda: fm.masks.tree(parents=[-1, 0, 0, 1]).dense(12),
        r"^tree\(parents=\[-1, 0, 0, 1\]\) has 4 .* q_len is 12$",
    ),
    (
        "tree of ancestors",
        lambda: fm.masks.tree([[True]]).dense(2),
        r"^tree\(ancestors=\[\[True\]\]\) has 1 values .* q_len is 2$",
    ),
    ("ids of other queries", lambda: (fm.causal() & fm.document([0, 0])).rows(3), r"^document\(ids=\[0, 0\]\) has 2 values"),
    ("more data than queries", lambda: fm.document([0, 0, 1]).dense(2), r"document\(.* 3 values .* q_len is 2; give q_offset"),
    (
        "data without a name",
        lambda: (fm.table([1, 2])[q] > 0).dense(3),
        r"^table\(\[1, 2\]\)\[q\] has 2 values .* is 3$",
    ),
    ("too few ids", lambda: fm.document([0, 0, 1]).dense(4), "3 ... 4"),
    ("too few ids, rows", lambda: fm.document([0, 0, 1]).rows(4), "3 ... 4"),
    ("too few ids, mask_mod", lambda: fm.document([0, 0, 1]).mask_mod(4, form="expression"), "3 ... 4"),
    ("too few ids behind an offset", lambda: fm.document([0, 0, 1, 1]).dense(2, 4, q_offset=3), "4 ... 5 ... q_offset"),
    ("too few keep", lambda: fm.key_padding(keep=[True, False]).dense(3), "2 ... 3"),
    ("table too small", lambda: fm.from_dense([[True, True]]).dense(2), "1 ... 2"),
    ("one list for more queries than keys", lambda: fm.document([0, 0, 1]).dense(4, 3), "3 ... 4"),
    ("too many ids", lambda: fm.document([0, 0, 1, 1]).dense(3), "4 ... 3"),
    ("lookup before the start", lambda: (fm.table([1, 2])[q - 1] > 0).dense(2), "-1"),
    ("lookup behind the end", lambda: (fm.table([1, 2])[q + 1] > 0).dense(2), "2"),
    ("shifted ids", lambda: fm.masks.shift(fm.document([0, 0, 1, 1]), q=1).dense(4), "-1"),
    (
        "one list too long for the queries, and one for the keys",
        lambda: (fm.key_padding([9]) & fm.query_padding([9])).dense(4, 9),
        "query_padding ... 9 ... 4",
    ),
    (
        "one list too long for the keys, and one for the queries",
        lambda: (fm.query_padding([9]) & fm.key_padding([9])).dense(9, 4),
        "key_padding ... 9 ... 4",
    ),
    ("lookup out of range", lambda: (fm.table([1, 2])[q] > 0).dense(3), "table ... 2"),
    ("two batches", lambda: (ragged() & fm.document([[0] * 6] * 2)).dense(6), "3 ... 2"),
    ("batch contradicts", lambda: ragged().dense(6, batch=2), "batch ... 2 ... 3"),
    ("batch contradicts, rows", lambda: ragged().rows(6, batch=4), "batch ... 4 ... 3"),
    ("batch contradicts, mask_mod", lambda: ragged().mask_mod(6, batch=4), "batch ... 4 ... 3"),
    ("batch contradicts, block_mask", lambda: ragged().block_mask(6, batch=4), "batch ... 4 ... 3"),
    ("heads contradict", lambda: fm.per_head([fm.causal(), fm.full()]).dense(4, heads=3), "heads ... 3 ... 2"),
    (
        "two numbers of heads",
        lambda: (fm.per_head([fm.causal()] * 2) & fm.per_head([fm.full() - fm.causal()] * 3)).dense(4),
        "2 ... 3",
    ),
    ("h without heads", lambda: (h < 1).dense(4), "heads"),
    ("b without batch", lambda: (b < 1).dense(4), "batch"),
    ("unbound parameter", lambda: fm.parse("causal & document(ids)").dense(4), r"ids ... bind"),
    ("unbound parameter, rows", lambda: fm.parse("kv < width").rows(4), r"width ... bind"),
    ("unbound parameter, block_mask", lambda: fm.parse("kv < width").block_mask(4), r"width ... bind"),
    ("bind of an unknown name", lambda: fm.parse("document(ids)").bind(idz=[0]), "idz ... ids"),
    ("bind of bad data", lambda: fm.parse("document(ids)").bind(ids=[0.5]), r"0\.5"),
    ("bind of a negative length", lambda: fm.parse("key_padding(n)").bind(n=[-2]), "key_padding ... -2"),
    ("tensors on two devices", lambda: (on(META) & on(torch.device("cpu"))).dense(6), "meta ... cpu ... to"),
    ("tensor elsewhere than asked", lambda: on(META).dense(6, device="cpu"), "meta ... cpu ... to"),
    (
        "not one run of ids",
        lambda: fm.per_document(fm.causal(), [0, 1, 0]).dense(3),
        "per_document|document ... run|once",
    ),
    ("dense too large", lambda: fm.causal().dense(10**6), "GiB|memory|large"),
]


def distributed(tensor: torch.Tensor) -> DTensor:
    """It on one rank, without a process group."""
    return DTensor.from_local(tensor, DeviceMesh("cpu", torch.arange(1), _init_backend=False, _rank=0), run_check=False)


#: What no mask can look up, with what to do about it.
ODD_TENSORS: dict[str, tuple[Callable[[], torch.Tensor], str]] = {
    "sparse": (lambda: torch.eye(4, dtype=torch.long).to_sparse(), r"layout torch.sparse_coo ... to_dense\(\)"),
    "sparse, boolean": (lambda: torch.eye(4, dtype=torch.bool).to_sparse(), r"layout torch.sparse_coo ... to_dense\(\)"),
    "compressed": (lambda: torch.eye(4).to_sparse_csr(), r"layout torch.sparse_csr ... to_dense\(\)"),
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "nested ... to_padded_tensor ... cu_seqlens"),
    "jagged": (
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
        "nested ... to_padded_tensor ... cu_seqlens",
    ),
    "quantized": (lambda: torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.quint8), r"quint8 ... int_repr\(\)"),
    "distributed": (lambda: distributed(torch.ones(4, dtype=torch.long)), r"DTensor ... to_local\(\)"),
    "complex": (lambda: torch.zeros(4, dtype=torch.complex64), "complex64"),
    "of no values": (lambda: torch.zeros(2, 0, dtype=torch.long), "no values"),
}

#: Where a mask takes data, one of each kind.
TAKES_DATA: dict[str, Callable[[Any], Any]] = {
    "table": fm.table,
    "document": fm.document,
    "document lengths": lambda data: fm.document(lengths=data),
    "per_document": lambda data: fm.per_document(fm.causal(), data),
    "key_padding": fm.key_padding,
    "keep": lambda data: fm.key_padding(keep=data),
    "hide": lambda data: fm.query_padding(hide=data),
    "from_dense": fm.from_dense,
    "prefix_lm": fm.prefix_lm,
    "global_window": lambda data: fm.masks.global_window(data, left=1, right=1),
    "reorder": lambda data: fm.masks.reorder(fm.causal(), q=data),
    "paged": lambda data: fm.masks.paged(fm.causal(), data, page_size=2),
    "tree": fm.masks.tree,
    "tree parents": lambda data: fm.masks.tree(parents=data),
    "bind": lambda data: fm.parse("document(ids)").bind(ids=data),
    "bind of a number": lambda data: fm.parse("kv < n").bind(n=data),
    "parse": lambda data: fm.parse("key_padding(keep=keep)", keep=data),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support|torch.quantize_per_tensor:UserWarning")
@pytest.mark.parametrize("name", ODD_TENSORS)
def test_tensors_that_hold_no_plain_values_are_refused(name: str) -> None:
    make, wanted = ODD_TENSORS[name]
    for use in TAKES_DATA.values():
        assert_refused(lambda use=use: use(make()), wanted)  # type: ignore[misc]


def deep(levels: int) -> Any:
    data: Any = 1
    for _ in range(levels):
        data = [data]
    return data


class Unreadable:
    """As an array of another library in another device's memory."""

    dtype = np.dtype("int64")

    def __array__(self) -> Any:
        raise TypeError("it is not in the memory of this computer")


@pytest.mark.parametrize(
    ("data", "wanted"),
    [
        (deep(17), "lists within lists"),
        (deep(5000), "lists within lists"),
        ({1, 2}, "set"),
        ({0: 1}, "dict"),
        ((n for n in (1, 2)), "generator"),
        (np.array(["a"]), "dtype <U1"),
        (np.array([None]), "dtype object"),
        ([torch.tensor([1, 2]), torch.tensor([3, 4])], "Tensor"),
        (Unreadable(), "Unreadable: it is not in the memory"),
        (b"01", "bytes"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_data_of_another_kind_is_refused(data: Any, wanted: str) -> None:
    for use in ("table", "document", "keep", "reorder", "bind"):
        assert_refused(lambda use=use: TAKES_DATA[use](data), wanted)  # type: ignore[misc]


def assert_refused(attempt: Attempt, wanted: str) -> None:
    """The error is the library's own and a builtin one, and its message holds every wanted part."""
    with pytest.raises(FlexmaskError) as caught:
        attempt()
    assert isinstance(caught.value, ValueError | TypeError)
    message = str(caught.value)
    for part in wanted.split(" ... "):
        assert re.search(part, message), f"{part!r} is not in the message: {message}"


@pytest.mark.parametrize(("attempt", "wanted"), [row[1:] for row in OPERATORS], ids=[row[0] for row in OPERATORS])
def test_operator_is_refused(attempt: Attempt, wanted: str) -> None:
    assert_refused(attempt, wanted)


@pytest.mark.parametrize(("attempt", "wanted"), [row[1:] for row in DATA], ids=[row[0] for row in DATA])
def test_data_is_refused(attempt: Attempt, wanted: str) -> None:
    assert_refused(attempt, wanted)


@pytest.mark.parametrize(("attempt", "wanted"), [row[1:] for row in LOWERING], ids=[row[0] for row in LOWERING])
def test_lowering_is_refused(attempt: Attempt, wanted: str) -> None:
    assert_refused(attempt, wanted)


@pytest.mark.parametrize("attempt", [row[1] for row in OPERATORS[:5]], ids=[row[0] for row in OPERATORS[:5]])
def test_misuse_of_python_logic_is_a_type_error(attempt: Attempt) -> None:
    with pytest.raises(TypeError):
        attempt()


# ---------------------------------------------------------------- truth values as 0 and 1


def narrow(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.uint8)


@pytest.mark.parametrize("make", [list, np.array, torch.tensor, narrow])
@pytest.mark.parametrize("what", ["keep", "hide"])
@pytest.mark.parametrize("define", [fm.key_padding, fm.query_padding])
def test_keep_and_hide_as_tokenizers_give_them(define: Any, what: str, make: Callable[[Any], Any]) -> None:
    rows = [[1, 1, 1, 0], [1, 0, 0, 0]]
    wanted = define(**{what: torch.tensor(rows) != 0})
    bound = fm.parse(f"{define.__name__}({what}=mask)").bind(mask=make(rows))
    for mask in (define(**{what: make(rows)}), bound):
        for lowered, other in ((mask, wanted), (mask & fm.causal(), wanted & fm.causal())):
            assert torch.equal(lowered.dense(4), other.dense(4))
            assert lowered.rows(4).exact
            assert lowered.equals(other, 4)
        assert str(mask) == str(fm.from_mask_mod(mask))
    if make is list:
        assert fm.parse(str(bound)) == bound


@pytest.mark.parametrize("make", [list, torch.tensor, narrow])
@pytest.mark.parametrize(
    ("text", "data"),
    [
        ("from_dense(data)", [[1, 0, 0, 1]] * 4),
        ("tree(ancestors=data)", [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]]),
        ("global_window(data, left=0, right=0)", [1, 0, 1, 0]),
    ],
)
def test_all_truth_values_may_be_0_and_1(text: str, data: Any, make: Callable[[Any], Any]) -> None:
    wanted = fm.parse(text, data=torch.tensor(data) != 0).dense(4)
    assert torch.equal(fm.parse(text, data=make(data)).dense(4), wanted)
    plan = fm.plan(text, 4)
    assert torch.equal(plan(data=make(data)).dense(), wanted)
    data = torch.tensor(data)
    data[..., 0] = 2
    for lower in (fm.parse(text, data=data).dense, lambda q_len: plan(data=data)):
        with pytest.raises(fm.errors.LoweringError, match="or of 0 and 1, must be at most 1, got 2"):
            lower(4)


@pytest.mark.parametrize("lengths", [[0, 1], [1, 1], [0, 0]])
def test_short_lengths_are_lengths(lengths: list[int]) -> None:
    """As many as there are positions, they could be a keep mask."""
    wanted = torch.arange(2) < torch.tensor(lengths)[:, None]
    for form in (lengths, torch.tensor(lengths)):
        for mask in (fm.key_padding(form), fm.cross_length(form)):
            assert torch.equal(mask.dense(2), wanted[:, None, None].expand(2, 1, 2, 2))
        assert torch.equal(fm.query_padding(form).dense(2), wanted[:, None, :, None].expand(2, 1, 2, 2))
        assert torch.equal(fm.plan("key_padding(n)", 2)(n=form).dense(), fm.key_padding(form).dense(2))


def test_keep_of_other_numbers_is_refused_where_it_can_be_read() -> None:
    tensor = torch.tensor([1, 1, 0, 1])
    mask = fm.key_padding(keep=tensor)
    assert mask.dense(4).sum() == 12
    tensor[1] = 2
    with pytest.raises(
        fm.errors.LoweringError, match=r"key_padding: keep, .*True for a real token .*, or of 0 and 1, must be at most 1, got 2"
    ):
        mask.dense(4)
    tensor[1] = -1
    with pytest.raises(fm.errors.LoweringError, match="must be at least 0, got -1"):
        mask.block_mask(4)


def test_lengths_of_a_mask_on_blocks() -> None:
    """A length is checked against the number of blocks there."""
    mask = fm.masks.coarse(fm.key_padding([2, 1]), 2)
    assert mask.dense(4, 4)[:, 0, 0].tolist() == [[True] * 4, [True, True, False, False]]
    with pytest.raises(fm.errors.LoweringError, match=r"lengths must be at most \(kv_len \+ 2 - 1\) // 2 = 1, got 2"):
        mask.dense(2)


# ---------------------------------------------------------------- the value next to each limit is accepted


@pytest.mark.parametrize(
    "attempt",
    [
        lambda: fm.key_padding([0, 8]).dense(8),
        lambda: fm.query_padding([0, 8]).dense(8, 3),
        lambda: fm.cross_length([8], q_lengths=[2]).dense(2, 8),
        lambda: fm.prefix_lm(8).dense(8),
        lambda: fm.document(lengths=[5, 3]).dense(8),
        lambda: fm.document(lengths=[0, 8, 0]).dense(8),
        lambda: fm.document(cu_seqlens=[0, 0, 8]).dense(8),
        lambda: fm.document([0, 0, 1, 1, 1]).dense(2, 5, q_offset=3),
        lambda: fm.sliding_window(left=0, right=0).dense(4),
        lambda: fm.sliding_window(size=1).dense(4),
        lambda: fm.causal().dense(1, 1, q_offset=0),
        lambda: fm.causal().block_mask(1, block_size=1),
        lambda: ragged().dense(5, batch=3, heads=1),
        lambda: fm.key_padding(np.int64(3)).dense(4),
        lambda: fm.causal().dense(4, 4, device="cpu"),
    ],
)
def test_boundary_is_accepted(attempt: Attempt) -> None:
    assert attempt() is not None


def test_messages_about_long_data_stay_short() -> None:
    ids = [0] * 20_000
    attempts: list[Attempt] = [
        lambda: fm.document(ids).dense(20_001),
        lambda: (fm.document([ids, ids]) & ragged()).rows(20_000),
        lambda: fm.parse(f"causal & document(ids={ids}) & casual()"),
    ]
    for attempt in attempts:
        with pytest.raises(FlexmaskError) as caught:
            attempt()
        assert len(str(caught.value)) < 2000


def test_every_error_derives_from_one() -> None:
    errors = [value for name, value in vars(fm.errors).items() if name.endswith("Error")]
    assert len(errors) > 3
    assert all(issubclass(error, FlexmaskError) for error in errors)
    assert all(error is FlexmaskError or issubclass(error, ValueError | TypeError) for error in errors)
