"""The census: what becomes of each model class of transformers is as its file says, and as the README says."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import transformers
from flexmask_transformers import census
from flexmask_transformers.census import Entry, class_names, examine, main, read, summary
from flexmask_transformers.recording import using

FOLDER = Path(__file__).parents[1]
FILE = FOLDER / "census.tsv"
ENTRIES = read(FILE)
IS_ITS_VERSION = FILE.read_text().startswith(f"# transformers {transformers.__version__},")
of_its_version = pytest.mark.skipif(not IS_ITS_VERSION, reason="the file is of another version of transformers")

#: One class for each way in which layers, masks and positions of models differ.
SAMPLE = (
    *("LlamaForCausalLM", "MistralForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM"),
    *("GptOssForCausalLM", "MixtralForCausalLM", "Llama4ForCausalLM", "DeepseekV3ForCausalLM"),
    *("Phi3ForCausalLM", "GPT2LMHeadModel", "OPTForCausalLM", "BartForCausalLM"),
    *("BlenderbotSmallForCausalLM", "BartForConditionalGeneration", "T5ForConditionalGeneration", "T5EncoderModel"),
    *("LongT5Model", "BertForMaskedLM", "ModernBertForMaskedLM", "ElectraForMaskedLM"),
    *("AlbertForMaskedLM", "MobileBertForMaskedLM", "CLIPTextModel", "CLIPModel"),
    *("ViTModel", "SamVisionModel", "FlavaModel", "Qwen2VLForConditionalGeneration"),
    *("Qwen2VLTextModel", "GlmOcrForConditionalGeneration", "JambaForCausalLM", "Qwen3NextForCausalLM"),
    *("Qwen3_5ForCausalLM", "BambaForCausalLM", "Lfm2ForCausalLM", "FalconForCausalLM"),
    *("MptForCausalLM", "XLNetLMHeadModel", "BridgeTowerModel", "CsmDepthDecoderModel"),
)


@of_its_version
@pytest.mark.parametrize("name", SAMPLE)
def test_a_class_is_as_the_file_says(name: str) -> None:
    found = examine(name)
    assert found is not None
    assert found[:6] == ENTRIES[name][:6], found.reason


def test_no_class_leaks_or_differs() -> None:
    assert [entry for entry in ENTRIES.values() if entry.is_fault] == []
    assert all(entry.reason for entry in ENTRIES.values() if "-" in (entry.plain, entry.packed))


def test_the_readme_has_the_model_types() -> None:
    assert summary(ENTRIES.values()) in (FOLDER / "README.md").read_text()


@of_its_version
@pytest.mark.exhaustive
def test_all_classes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Classes that ran have more time than where the file was written, by a machine that may be faster; the others as much."""
    path, ran = str(tmp_path / "census.tsv"), [name for name, entry in ENTRIES.items() if entry.plain != "-"]
    with monkeypatch.context() as patch:
        patch.setattr(census, "SECONDS", 10 * census.SECONDS)
        assert main([path, *ran]) == 0
    assert main([path]) == 0
    found = read(Path(path))
    assert {name: found[name][:6] for name in ran} == {name: ENTRIES[name][:6] for name in ran}


@of_its_version
class TestFaultsAreSeen:
    """Where another implementation takes the place of flexmask."""

    @pytest.fixture(autouse=True)
    def sdpa(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(census, "using", lambda model, _: using(model, "sdpa"))

    @pytest.mark.parametrize(
        ("name", "packed"), [("BertModel", "LEAK"), ("BartForCausalLM", "LEAK"), ("LlamaForCausalLM", "isolated")]
    )
    def test_packed_rows(self, name: str, packed: str) -> None:
        found = examine(name)
        assert found is not None
        assert (found.plain, found.packed) == ("same", packed)
        assert found.is_fault == (packed == "LEAK")

    def test_other_numbers(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(census, "DIFFERENCE", 0.0)
        found = examine("LlamaForCausalLM")
        assert found is not None
        assert found.plain == "DIFFERENT"
        assert "differs by" in found.reason


class TestFile:
    @pytest.fixture(autouse=True)
    def classes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def examined(name: str) -> Entry | None:
            if name == "Crash":
                os._exit(3)
            while name == "Loop":
                pass
            return None if name == "Other" else Entry(name, name.lower(), "same", packed="isolated")

        monkeypatch.setattr(census, "examine", examined)
        monkeypatch.setattr(census, "SECONDS", 0.5)

    def test_a_class_that_ends_its_process_or_takes_too_long_is_listed(self, tmp_path: Path, capsys: Any) -> None:
        path = tmp_path / "census.tsv"
        assert main([str(path), "A", "Crash", "B", "Loop", "Other", "C"]) == 0
        found = read(path)
        assert list(found) == ["A", "Crash", "B", "Loop", "C"]
        assert [found[name].reason for name in ("A", "Crash", "Loop", "C")] == ["", "its process ended with 3", "takes 0.5 s", ""]
        assert "**Isolated** (3): a, b, c." in capsys.readouterr().out

    def test_a_file_is_continued(self, tmp_path: Path) -> None:
        path = tmp_path / "census.tsv"
        main([str(path), "A"])
        main([str(path), "A", "B"])
        assert [line.split("\t")[0] for line in path.read_text().splitlines()[1:]] == ["name", "A", "B"]


def test_names_of_classes() -> None:
    names = class_names()
    assert {"LlamaModel", "BertForMaskedLM"} <= set(names)
    assert not {"AutoModel", "LlamaPreTrainedModel", "LlamaConfig"} & set(names)
