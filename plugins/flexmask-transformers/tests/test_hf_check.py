"""Which packed documents leak, in Python and on the command line."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

import click
import flexmask_transformers
import pytest
import torch
import transformers
from click.testing import CliRunner
from flexmask_transformers.check import PackingResult
from flexmask_transformers.cli import _chosen, hf
from flexmask_transformers.models import small_model
from hf_models import BOTH_TYPES, TEXT, pair

import flexmask
from flexmask.cli import main

#: The ways to pack that transformers sees, and those that it drops.
SEEN = {"position_ids", "position_ids, cu_seq_lens", "position_ids, seq_idx"}


class TestCheckPacking:
    @pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2"])
    @pytest.mark.parametrize("attention", ["eager", "sdpa"])
    def test_what_transformers_drops_leaks(self, name: str, attention: str) -> None:
        found = flexmask_transformers.check_packing(pair(name)[0], attention=[attention], lengths=(4, 6))
        assert {one.packed_by for one in found.results} - {one.packed_by for one in found.leaks} == SEEN
        assert {one.positions for one in found.leaks} == {tuple(range(4, 10))}
        assert min(one.leak for one in found.leaks) > 0.01

    @pytest.mark.parametrize("name", ["llama", "gemma3", "mistral", "gpt2", "gpt_oss", "mixtral", "deepseek_v3"])
    def test_flexmask_does_not_leak(self, name: str) -> None:
        found = flexmask_transformers.check_packing(pair(name)[0], attention=["flexmask"])
        assert len(found.results) == 8
        assert found.leaks == ()
        assert [one.error for one in found.results] == [""] * 8
        restarting = [one for one in found.results if "position_ids" in one.packed_by or name != "gpt2"]
        assert max(one.difference for one in restarting) < 1e-4

    def test_what_is_refused_is_in_the_report(self) -> None:
        found = flexmask_transformers.check_packing(pair("llama4")[0], attention=["flexmask", "no_such"])
        refused = {one.packed_by: one.error for one in found.results if one.error}
        assert set(refused) == {"cu_seq_lens", "seq_idx", ""}
        assert refused["seq_idx"].startswith("LoweringError: this model's chunks start with each document")
        assert "no_such" in refused[""]

    def test_the_model_is_as_before(self) -> None:
        eager, _ = pair("llama")
        eager.train()
        flexmask_transformers.check_packing(eager, attention=["flexmask"], lengths=(2, 2))
        assert eager.training
        assert eager.config._attn_implementation == "eager"
        eager.eval()

    def test_texts_of_results(self) -> None:
        assert str(PackingResult("sdpa", "seq_idx", 0.5, (3, 4, 5, 9))) == "LEAKS by 0.5 into positions 3-5, 9"
        assert str(PackingResult("sdpa", "seq_idx")) == "isolated"
        assert str(PackingResult("sdpa", "seq_idx", difference=0.25)) == "isolated, at other positions (differs by 0.25)"
        assert str(PackingResult("sdpa", "seq_idx", error="ValueError: no")) == "refused: ValueError: no"

    def test_errors(self) -> None:
        with pytest.raises(ValueError, match=r"at least two documents.*lengths=\[5\]"):
            flexmask_transformers.check_packing(pair("llama")[0], lengths=[5])
        with pytest.raises(ValueError, match="has an encoder and a decoder"):
            flexmask_transformers.check_packing(pair("bart")[0])
        with pytest.raises(FileNotFoundError, match="there is no file or folder"):
            flexmask_transformers.check_packing("nowhere.json")


class TestSmallModel:
    def test_large_configs_become_small(self) -> None:
        model = small_model(transformers.MixtralConfig(hidden_size=64, num_attention_heads=4, num_key_value_heads=2))
        assert sum(parameter.numel() for parameter in model.parameters()) < 200_000

    def test_all_types_of_layers_are_kept(self) -> None:
        types = ["sliding_attention"] * 3 + ["full_attention"] + ["sliding_attention"] * 5
        config = transformers.Gemma3TextConfig(**{**TEXT, **BOTH_TYPES, "num_hidden_layers": 9, "layer_types": types})
        assert small_model(config).config.layer_types == types[:4]
        assert config.num_hidden_layers == 9

    def test_the_text_model_of_several(self) -> None:
        config = transformers.Gemma3Config(text_config={**TEXT, **BOTH_TYPES})
        assert type(small_model(config)).__name__ == "Gemma3ForCausalLM"

    def test_encoders_and_decoders_are_refused(self) -> None:
        with pytest.raises(ValueError, match="BartConfig is for an encoder and a decoder"):
            small_model(transformers.BartConfig())


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("model")
    transformers.Gemma3TextConfig(**TEXT, **BOTH_TYPES).save_pretrained(folder)
    verbosity = transformers.logging.get_verbosity()
    yield folder / "config.json"
    transformers.logging.set_verbosity(verbosity)


def run(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(hf, [str(argument) for argument in arguments])
    return result.exit_code, result.stdout, result.stderr


def test_a_model_whose_weights_are_zeros_is_not_called_isolated(config: Path) -> None:
    model = small_model(config)
    for name, parameter in model.named_parameters():
        if "o_proj" in name:
            torch.nn.init.zeros_(parameter)
    assert {str(result) for result in flexmask_transformers.check_packing(model, attention=["sdpa", "flexmask"]).results} == {
        "refused: ValueError: no output depends on other tokens, so nothing could leak: give weights that are zeros random values"
    }


class TestCommandLine:
    def test_check(self, config: Path) -> None:
        code, out, _ = run("check", config, "--attention", "flexmask")
        assert code == 0
        assert out.count("isolated") == 8
        code, out, _ = run("check", config.parent, "--attention", "sdpa", "--json")
        assert code == 1
        results = {one["packed_by"]: one for one in json.loads(out)}
        assert results["position_ids"]["positions"] == []
        assert results["position_ids, with a cache"]["positions"] == list(range(5, 16))

    def test_render_draws_each_mask_once(self, config: Path) -> None:
        code, out, _ = run("render", config, "--text", "The black cat sat down", "--text", "and slept")
        assert code == 0
        assert out.count("q\\kv") == 2
        assert "sliding_window(left=3, right=0) & document(ids=<int64[1, 7]>)" in out
        assert "causal & document(ids=<int64[1, 7]>)" in out
        assert "slept" in out

    def test_render_the_masks_of_sdpa(self, config: Path) -> None:
        code, out, _ = run("render", config, "--text", "The black cat sat down", "--text", "and slept", "--attention", "sdpa")
        assert code == 0
        assert "sliding_window(left=3, right=0) & document(lengths=[5, 2])" in out
        assert "causal & document(lengths=[5, 2])" in out

    def test_masks_of_one_text_with_other_data_are_drawn_each(self) -> None:
        masks = [flexmask.key_padding(torch.tensor([length])) for length in (3, 2, 3)]
        assert [str(mask) for mask in masks] == [str(masks[0])] * 3
        named = dict(zip(("one", "two", "three"), masks, strict=True))
        assert _chosen(named, None, 4) == {"one and 1 more": masks[0], "two": masks[1]}

    def test_render_a_layer(self, config: Path, tmp_path: Path) -> None:
        code, out, _ = run("render", config, "--text", "The black cat sat down", "--layer", "1")
        assert code == 0
        assert "model.layers.1.self_attn" in out
        assert "sliding" not in out
        path = tmp_path / "mask.svg"
        assert run("render", config, "--text", "The cat", "--layer", "model.layers.0.self_attn", "--why", "-o", path)[0] == 0
        assert "<svg" in path.read_text()

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["render", "CONFIG", "--text", " "], "a --text has no word"),
            (["render", "CONFIG", "--text", "a", "--layer", "7"], "there is no layer '7'; the layers are model.layers.0"),
            (
                ["render", "CONFIG", "--text", "The black cat sat down", "-o", "x.png"],
                "the layers have 2 masks, and a file has one",
            ),
            (["check", "nowhere.json"], "there is no file or folder 'nowhere.json'"),
        ],
    )
    def test_errors(self, config: Path, arguments: list[str], message: str) -> None:
        code, _, err = run(*(str(config) if argument == "CONFIG" else argument for argument in arguments))
        assert code == 2
        assert message in err

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("{}", "Unrecognized model"),
            ("3", "is no config of transformers"),
            ('{"model_type": "llama", "hidden_size": "x"}', "is no config of transformers"),
            ('{"model_type": "vit"}', "ViTConfig has no vocabulary"),
        ],
    )
    def test_a_file_that_is_no_config(self, tmp_path: Path, text: str, message: str) -> None:
        (tmp_path / "config.json").write_text(text)
        code, _, err = run("check", tmp_path)
        assert code == 2
        assert message in err

    def test_a_check_that_checks_nothing_fails(self, config: Path) -> None:
        code, out, _ = run("check", config, "--attention", "no_such")
        assert code == 1
        assert "refused" in out

    def test_the_entry_point(self) -> None:
        project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
        entries = project["entry-points"]["flexmask.commands"]
        command = EntryPoint("hf", entries["hf"], "flexmask.commands").load()
        assert command is hf
        assert isinstance(command, click.Command)
        assert "hf" not in main.commands


def test_checks_run_without_gradients() -> None:
    eager, _ = pair("llama")
    flexmask_transformers.check_packing(eager, attention=["flexmask"], lengths=(2, 2))
    assert all(parameter.grad is None for parameter in eager.parameters())
    assert torch.is_grad_enabled()


def test_a_check_leaves_modes_and_random_numbers_alone() -> None:
    config = transformers.LlamaConfig(**TEXT)
    model = small_model(config)
    model.train()
    model.model.norm.eval()
    torch.manual_seed(7)
    wanted = torch.rand(3)
    torch.manual_seed(7)
    flexmask_transformers.check_packing(model, attention=["sdpa"], lengths=(3, 4))
    small_model(config)
    assert torch.equal(torch.rand(3), wanted)
    assert model.training
    assert model.model.layers.training
    assert not model.model.norm.training
