"""Linear forms: their terms, their arithmetic and their text."""

from typing import cast

import pytest

from flexmask import kv, param, q
from flexmask.expr.index import Arithmetic, Constant, Index
from flexmask.expr.linear import Linear, Quotient, Sum

#: Expressions, their factors and constant, their text as a linear form, and the text of half of them.
FORMS: list[tuple[Index, dict[str, int], int, str, str]] = [
    (cast(Index, Constant(7)), {}, 7, "7", "3"),
    (cast(Index, Constant(-7)), {}, -7, "-7", "-4"),
    (kv + 0, {"kv": 1}, 0, "kv", "kv // 2"),
    (q - q, {}, 0, "0", "0"),
    (q + kv + 1, {"q": 1, "kv": 1}, 1, "q + kv + 1", "(q + kv + 1) // 2"),
    (q - kv * 2, {"q": 1, "kv": -2}, 0, "q - kv * 2", "(q - kv * 2) // 2"),
    (2 * q - kv, {"q": 2, "kv": -1}, 0, "q * 2 - kv", "(q * 2 - kv) // 2"),
    (3 * (q - 2), {"q": 3}, -6, "q * 3 - 6", "(q * 3 - 6) // 2"),
    (kv * 2 - kv, {"kv": 1}, 0, "kv", "kv // 2"),
    (-kv, {"kv": -1}, 0, "-kv", "(-kv) // 2"),
    (-kv - 5, {"kv": -1}, -5, "-kv - 5", "(-kv - 5) // 2"),
    (-kv + q, {"kv": -1, "q": 1}, 0, "q - kv", "(q - kv) // 2"),
    (abs(q) * -2 + 3, {"abs(q)": -2}, 3, "-abs(q) * 2 + 3", "(-abs(q) * 2 + 3) // 2"),
    (-(q // 3) * 4, {"q // 3": -4}, 0, "-(q // 3) * 4", "(-(q // 3) * 4) // 2"),
    (q // 3 + kv // 2, {"q // 3": 1, "kv // 2": 1}, 0, "q // 3 + kv // 2", "(q // 3 + kv // 2) // 2"),
    (q * kv * 3, {"q * kv": 3}, 0, "q * kv * 3", "(q * kv * 3) // 2"),
    (q % 3 - kv % 2, {"q % 3": 1, "kv % 2": -1}, 0, "q % 3 - kv % 2", "(q % 3 - kv % 2) // 2"),
]

each_form = pytest.mark.parametrize(("index", "factors", "constant", "text", "half"), FORMS, ids=[str(form[0]) for form in FORMS])


@each_form
def test_form(index: Index, factors: dict[str, int], constant: int, text: str, half: str) -> None:
    form = Linear.of(index)
    assert {str(term): factor for term, factor in form.terms.values()} == factors
    assert form.constant == constant
    assert Linear.of(form.index()) == form
    assert Sum.make(tuple(form.terms.values()), constant).key == form.index().key
    assert str(form.index()) == text
    assert str((form // 2).index()) == half
    assert (form // 1) == form


def is_form_of(form: Linear, index: Index) -> bool:
    return form.index().key == Linear.of(index).index().key


def test_arithmetic() -> None:
    left, right = Linear.of(q * 2 - kv + 3), Linear.of(kv * 3 - q * 2 + 4)
    assert is_form_of(left + right, kv * 2 + 7)
    assert is_form_of(left + -right, q * 4 - kv * 4 - 1)
    assert is_form_of(left + 5, q * 2 - kv + 8)
    assert is_form_of(left * 3, q * 6 - kv * 3 + 9)
    assert left * 0 == Linear({}, 0)


def test_parts() -> None:
    both = q * kv
    form = Linear.of(q * 6 - kv * 4 + both * 2 + 5)
    assert form.divisor == 2
    assert is_form_of(form.divided(9), q * 3 - kv * 2 + both + 9)
    assert is_form_of(form.divided(9).divided(8), q * 3 - kv * 2 + both + 8)
    assert is_form_of(form.only(kv=True), both * 2 - kv * 4)
    assert is_form_of(form.only(kv=False), q * 6 + 5)
    assert is_form_of(form.without(kv.key), q * 6 + both * 2 + 5)
    assert form.holds({"q"})
    assert form.holds({"q", "kv"})
    assert not Linear.of(q + kv).holds({"q", "kv"})


@pytest.mark.parametrize("constant", [-(2**63) - 1, -(2**63), -1, 0, 2**63 - 1, 2**63])
def test_constants_of_any_size(constant: int) -> None:
    index = Linear({}, constant).index()
    assert isinstance(index, Constant) == (-(2**63) <= constant < 2**63)
    assert Linear.of(index) == Linear({}, constant)
    assert str(index) == str(constant)


def test_terms_are_not_a_constant() -> None:
    assert Linear.of(q + 0).index() is q
    assert isinstance(Linear.of(q * 2).index(), Sum)
    assert isinstance(Linear.of(q + 1).index(), Sum)


def test_order_does_not_matter() -> None:
    left, right = Linear.of(q * 2 - kv + 1).index(), Linear.of(1 - kv + 2 * q).index()
    assert left.key == right.key
    assert left.key != Linear.of(q * 2 - kv + 2).index().key
    assert left.key != Linear.of(q * 3 - kv + 1).index().key


def test_within_other_expressions() -> None:
    """A form has the precedence of what is written last in it."""
    form, single = Linear.of(q * 2 - kv + 1).index(), Linear.of(q * 2).index()
    assert str(Arithmetic("*", form, kv)) == "(q * 2 - kv + 1) * kv"
    assert str(Arithmetic("-", kv, form)) == "kv - (q * 2 - kv + 1)"
    assert str(Arithmetic("-", form, kv)) == "q * 2 - kv + 1 - kv"
    assert str(Arithmetic("+", kv, Quotient(form, 3))) == "kv + (q * 2 - kv + 1) // 3"
    assert str(Arithmetic("%", kv, Quotient(single, 3))) == "kv % ((q * 2) // 3)"
    assert str(Quotient(kv, 3)) == "kv // 3"
    assert str(Quotient(param("n"), 3)) == "n // 3"
    assert repr(Quotient(param("n"), 3)) == "param('n') // 3"
