"""``flexmask find``: what is found by the names of models and methods, in which order, and what is not."""

import json

import pytest

from tests.support.cli import run

#: Words, and the expression that is found first.
FIRST = [
    ("longformer", "global_window(is_global, left=4, right=4)"),
    ("llama4", "causal & chunked(size=16) & document(lengths=[21, 10, 17])"),
    ("Llama 4", "causal & chunked(size=16) & document(lengths=[21, 10, 17])"),
    ("gemma", "sliding_window(size=8) | document(images)"),
    ("sliding window", "sliding_window(*, left=..., right=..., size=None)"),
    ("streaming llm", "sink_window(sinks=4, size=10)"),
    ("streamingllm", "sink_window(sinks=4, size=10)"),
    ("bigbird", "bigbird(blocks, size, *, random_blocks=3, global_blocks=1, around=1, seed=0)"),
    ("big-bird", "bigbird(blocks, size, *, random_blocks=3, global_blocks=1, around=1, seed=0)"),
    ("swin shifted", "shifted_window(canvas=[6, 8], window=[3, 4], shift=[1, 2])"),
    ("alibi", "causal"),
    ("longfromer", "global_window(is_global, left=4, right=4)"),
    ("2309.17453", "sink_window(sinks=4, size=10)"),
]


@pytest.mark.parametrize(("words", "text"), FIRST, ids=[words for words, _ in FIRST])
def test_what_is_found_first(words: str, text: str) -> None:
    result = run("find", *words.split())
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[1] == f"  {text}"
    answer = json.loads(run("find", words, "--json").stdout)
    assert answer[0]["text"] == text


def test_each_word_must_be_had() -> None:
    titles = [one["title"] for one in json.loads(run("find", "video", "tile", "--json").stdout)]
    assert "Sliding tiles of a video" in titles
    assert "Neighborhood of a video" not in titles
    assert len(titles) == len(set(titles))


def test_a_long_list_is_cut_and_says_so() -> None:
    count = len(json.loads(run("find", "attention", "--json").stdout))
    lines = run("find", "attention").stdout.splitlines()
    assert (len(lines), lines[-1]) == (25, f"{count - 12} more; another word leaves fewer")


@pytest.mark.parametrize("word", ["zzzzz", "nothingxx"])  # the second is close to "routing"
def test_nothing_is_found(word: str) -> None:
    result = run("find", word, "window")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == f"Error: no mask is found by {word} window; `flexmask list` shows all named masks\n"


def test_list_finds_what_has_another_name() -> None:
    result = run("list", "longformer")
    assert result.exit_code == 2
    wanted = "`flexmask find longformer` finds Global tokens and a window: global_window(is_global, left=4, right=4)"
    assert result.stderr == f"Error: there is no named mask longformer. {wanted}\n"
    assert run("list", "zzzzz").stderr == "Error: there is no named mask zzzzz. `flexmask list` shows all\n"
    assert (
        run("list", "casual").stderr == "Error: there is no named mask casual. Did you mean causal? `flexmask list` shows all\n"
    )
