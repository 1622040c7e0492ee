"""``position_ids`` that a model gives to its embeddings alone: its forward is seen, and its documents are isolated or refused."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest
import torch
import transformers
from flexmask_transformers.forwards import observe_tree
from hf_models import ENCODER, TEXT, VISION, gradients, make_pair, pair, tokens
from huggingface_hub.errors import StrictDataclassFieldValidationError
from test_hf_masks import positions
from test_hf_models import CLOSE
from torch import Tensor
from torch.testing import assert_close

from flexmask.errors import LoweringError

LENGTHS = (5, 7)
PACKED = positions(*LENGTHS)


def hidden(model: Any, ids: Tensor, **inputs: Any) -> Tensor:
    found = model(ids, **inputs)[0]
    assert isinstance(found, Tensor)
    return found


def alone(eager: Any, ids: Tensor, places: Tensor = PACKED) -> Tensor:
    """What a model gives for each document without the others."""
    parts = zip(ids.split(LENGTHS, 1), places.split(LENGTHS, -1), strict=True)
    return torch.cat([hidden(eager, part, position_ids=own) for part, own in parts], 1)


@cache
def encoder(name: str, **options: Any) -> tuple[Any, ...]:
    config = getattr(transformers, f"{name}Config")
    model = getattr(transformers, f"{name}Model")
    return make_pair(model, lambda: config(**{**ENCODER, "num_hidden_layers": 1, "num_key_value_heads": 4, **options}))


@pytest.mark.parametrize("name", ["Bert", "Roberta", "Electra", "CLIPText", "XLMRobertaXL", "Ernie"])
def test_positions_that_reach_the_embeddings_alone(name: str) -> None:
    eager, ours = encoder(name)
    places = PACKED + (2 if "Roberta" in name else 0)
    assert_close(hidden(ours, tokens(1), position_ids=places), alone(eager, tokens(1), places), **CLOSE)


def test_positions_by_place_and_in_a_model_within_another() -> None:
    eager, ours = pair("bert")
    found = ours(tokens(1), None, None, PACKED).logits
    assert_close(found, alone(eager, tokens(1)), **CLOSE)


def test_rows_with_padding() -> None:
    eager, ours = encoder("Bert")
    keep = torch.tensor([[1] * 5 + [0] * 2 + [1] * 5])
    places = torch.cat([torch.arange(5), torch.tensor([0, 1]), torch.arange(5)])[None]
    found = hidden(ours, tokens(1), position_ids=places, attention_mask=keep)
    for part in (slice(0, 5), slice(7, 12)):
        assert_close(found[:, part], hidden(eager, tokens(1)[:, part]), **CLOSE)


def test_positions_that_do_not_restart_are_one_document() -> None:
    eager, ours = encoder("Bert")
    places = torch.arange(0, 24, 2)[None]
    assert_close(hidden(ours, tokens(1), position_ids=places), hidden(eager, tokens(1), position_ids=places), **CLOSE)


def test_a_whole_mask_of_your_own_has_no_documents() -> None:
    eager, ours = encoder("Bert")
    visible = torch.ones(1, 1, 12, 12, dtype=torch.bool).tril(3)
    wanted = hidden(eager, tokens(1), attention_mask=torch.where(visible, 0.0, -1e9), position_ids=PACKED)
    for mask in (visible, "sliding_window(left=20, right=3)"):
        assert_close(hidden(ours, tokens(1), attention_mask=mask, position_ids=PACKED), wanted, **CLOSE)


def test_one_graph_for_all_packings() -> None:
    eager, ours = encoder("Bert")
    compiled: Any = torch.compile(ours, backend="eager", fullgraph=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for places in (PACKED, positions(12)):
            found = hidden(compiled, tokens(1), position_ids=places)
            wanted = alone(eager, tokens(1)) if places is PACKED else hidden(eager, tokens(1))
            assert_close(found, wanted, **CLOSE)
    torch.compiler.reset()


@pytest.mark.parametrize("name", ["Roberta", "XLMRobertaXL", "Camembert", "Data2VecText", "RobertaPreLayerNorm"])
def test_positions_below_those_of_the_model(name: str) -> None:
    """RoBERTa counts from padding_idx + 1: the model alone makes these positions itself."""
    eager, ours = encoder(name, pad_token_id=1)
    parts = [hidden(eager, part) for part in tokens(1).split(LENGTHS, 1)]
    assert_close(hidden(ours, tokens(1), position_ids=PACKED + 2), torch.cat(parts, 1), **CLOSE)
    for places in (PACKED, PACKED + 1):
        with pytest.raises(LoweringError, match=r"counts tokens from padding_idx \+ 1 = 2: .* Give position_ids \+ 2 of those"):
            ours(tokens(1), position_ids=places)
    keep, padded = torch.tensor([[0] + [1] * 11]), torch.cat([torch.ones(1, 1), PACKED[:, :4] + 2, PACKED[:, 5:] + 2], 1).long()
    assert hidden(ours, tokens(1), position_ids=padded, attention_mask=keep).shape == (1, 12, 32)
    one = {"position_ids": positions(12)}  # one document, as in eager
    assert_close(hidden(ours, tokens(1), **one), hidden(eager, tokens(1), **one), **CLOSE)


@pytest.mark.parametrize("name", ["ContextEncoder", "QuestionEncoder", "Reader"])
def test_positions_that_a_model_does_not_pass_on(name: str) -> None:
    """It takes them with all other arguments. The model in it would count on through all documents."""
    config = transformers.DPRConfig(**{**ENCODER, "num_hidden_layers": 1})
    eager, ours = make_pair(getattr(transformers, f"DPR{name}"), lambda: config)
    for places in ({}, {"position_ids": positions(12)}):
        assert_close(hidden(ours, tokens(1), **places), hidden(eager, tokens(1), **places), **CLOSE)
    with pytest.raises(
        LoweringError, match=r"the model around BertModel, as one of PEFT, does not pass them on to it: .* at token 5 of row 0"
    ):
        ours(tokens(1), position_ids=PACKED)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.filterwarnings("ignore:.*removed in v6:FutureWarning")
def test_gradient_checkpointing(reentrant: bool) -> None:
    eager, ours = encoder("Bert", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    wanted = gradients(eager, alone(eager, tokens(1)).square().sum())
    ours.train().gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    ours.enable_input_require_grads()
    found = gradients(ours, hidden(ours, tokens(1), position_ids=PACKED).square().sum())
    for name in wanted:
        assert_close(found[name], wanted[name], rtol=1e-3, atol=1e-3)


def test_documents_of_cross_attention_are_refused() -> None:
    _, ours = encoder("Bert", is_decoder=True, add_cross_attention=True)
    encoded = {"encoder_hidden_states": torch.randn(1, 12, 32), "use_cache": False}
    assert hidden(ours, tokens(1), position_ids=positions(12), **encoded).shape == (1, 12, 32)
    for others in ({}, {"encoder_attention_mask": torch.ones(1, 12)}):
        with pytest.raises(LoweringError, match=r"position_ids restart inside a row, and .* at token 5 of row 0"):
            hidden(ours, tokens(1), position_ids=PACKED, **encoded, **others)


@pytest.mark.parametrize("name", ["bart", "t5"])
def test_packed_rows_of_an_encoder_and_a_decoder_are_refused(name: str) -> None:
    eager, ours = pair(name)
    given = {"input_ids": tokens(1), "decoder_input_ids": tokens(1), "use_cache": False}
    assert_close(ours(**given, position_ids=positions(12)).logits, eager(**given).logits, **CLOSE)
    with pytest.raises(LoweringError, match=r"and \w+ForConditionalGeneration has an encoder and a decoder: its documents would"):
        ours(**given, position_ids=PACKED)


def changed_outputs(model: Any, argument: str, **given: Any) -> Tensor:
    """``bool[12]``: which outputs depend on the first document of an argument."""
    other = torch.cat([tokens(1, 5, seed=1), given[argument][:, 5:]], 1)
    found, wanted = (own.logits[0] for own in (model(**{**given, argument: other}), model(**given)))
    return torch.ne(found, wanted).any(-1)


@pytest.mark.parametrize("argument", ["cu_seq_lens_q", "seq_idx"])
@pytest.mark.parametrize("name", ["bart", "t5"])
def test_documents_of_an_encoder_and_a_decoder_by_other_arguments(name: str, argument: str) -> None:
    """T5 has no absolute positions. Those of BART count on through the row."""
    eager, ours = pair(name)
    packing = {argument: torch.tensor([0, 5, 12]) if argument == "cu_seq_lens_q" else (torch.arange(12) >= 5).int()[None]}
    given = {"input_ids": tokens(1), "decoder_input_ids": tokens(1), "use_cache": False, **packing}
    for row in ("input_ids", "decoder_input_ids"):
        assert changed_outputs(ours, row, **given).tolist() == [True] * 5 + [False] * 7
    wanted = [eager(input_ids=part, decoder_input_ids=part).logits for part in tokens(1).split(LENGTHS, 1)]
    difference = (ours(**given).logits - torch.cat(wanted, 1)).abs()
    assert difference[:, :5].max() < 2e-5
    assert (difference[:, 5:].max() < 2e-5) == (name == "t5")


def test_documents_of_an_encoder_and_a_decoder_in_one_model() -> None:
    """It gives its decoder the arguments that start with decoder_, without that."""
    encoder, decoder = (transformers.BertConfig(**ENCODER, is_decoder=own, add_cross_attention=own) for own in (False, True))
    try:
        config = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
    except StrictDataclassFieldValidationError:
        pytest.skip("this transformers, as 5.4.0, makes no config of two models")
    _, ours = make_pair(transformers.EncoderDecoderModel, lambda: copy.deepcopy(config))
    rows = {"input_ids": tokens(1), "decoder_input_ids": tokens(1), "use_cache": False}
    packing = {"cu_seq_lens_q": torch.tensor([0, 5, 12])}
    with pytest.raises(LoweringError, match="an EncoderDecoderModel with decoder_cu_seq_lens_q as well"):
        ours(**rows, **packing)
    packing["decoder_cu_seq_lens_q"] = packing["cu_seq_lens_q"]
    for others in ({}, {"decoder_position_ids": PACKED}):
        for row in ("input_ids", "decoder_input_ids"):
            assert changed_outputs(ours, row, **rows, **packing, **others).tolist() == [True] * 5 + [False] * 7
    with pytest.raises(LoweringError, match=r"restart inside a row, and .* Give each document a row; cu_seq_lens_q or"):
        ours(**rows, decoder_position_ids=PACKED)


@pytest.mark.parametrize("name", ["bart", "t5"])
def test_positions_of_a_decoder_that_a_model_ignores(name: str) -> None:
    eager, ours = pair(name)
    given = {"input_ids": tokens(1), "decoder_input_ids": tokens(1), "use_cache": False}
    padded = torch.tensor([[0, 0, *range(10)]])
    keep = torch.tensor([[0, 0] + [1] * 10])
    for places, others in ((positions(12), {}), (padded, {"decoder_attention_mask": keep})):
        found = ours(**given, **others, decoder_position_ids=places).logits
        assert_close(found[:, 2:], eager(**given, **others).logits[:, 2:], **CLOSE)
    with pytest.raises(LoweringError, match=r"and \w+ForConditionalGeneration ignores decoder_position_ids: its documents would"):
        ours(**given, decoder_position_ids=PACKED)


@pytest.mark.parametrize("is_graph", [False, True])
def test_packed_rows_of_a_decoder_that_counts_its_positions_are_refused(is_graph: bool) -> None:
    """BART's decoder has absolute positions and takes none: documents would have others than alone."""
    config = pair("bart")[0].config.to_dict()
    eager, ours = make_pair(transformers.BartForCausalLM, lambda: transformers.BartConfig(**config))
    model: Any = torch.compile(ours, backend="eager", fullgraph=True) if is_graph else ours
    given = {"use_cache": False}
    assert_close(hidden(model, tokens(1), position_ids=positions(12), **given), hidden(eager, tokens(1)), **CLOSE)
    with pytest.raises((LoweringError, RuntimeError), match="BartDecoder counts positions by itself"):
        model(tokens(1), position_ids=PACKED, **given)
    torch.compiler.reset()


@pytest.mark.parametrize("is_graph", [False, True])
def test_arguments_that_a_model_does_not_pass_on_are_refused(is_graph: bool) -> None:
    """StableLM takes all arguments and drops those that it does not know."""
    options = {**TEXT, "num_hidden_layers": 1}
    del options["head_dim"]
    eager, ours = make_pair(transformers.StableLmForCausalLM, lambda: transformers.StableLmConfig(**options))
    model: Any = torch.compile(ours, backend="eager", fullgraph=True) if is_graph else ours
    offsets, one = torch.tensor([0, 5, 12]), torch.tensor([0, 12])
    assert_close(hidden(model, tokens(1), cu_seq_lens_q=one, use_cache=False), hidden(eager, tokens(1)), **CLOSE)
    with pytest.raises((LoweringError, RuntimeError), match="does not pass cu_seq_lens_q on to StableLmAttention; pack with pos"):
        model(tokens(1), cu_seq_lens_q=offsets, use_cache=False)
    if not is_graph:
        found = hidden(ours, tokens(1), cu_seq_lens_q=offsets, position_ids=PACKED, use_cache=False)
        assert_close(found, alone(eager, tokens(1)), **CLOSE)
    torch.compiler.reset()


class TestRowsOfTimeHeightAndWidth:
    """Qwen2-VL: three rows for time, height and width, or four of which the first is that of the text."""

    @staticmethod
    @cache
    def models() -> tuple[Any, ...]:
        def config() -> Any:
            rope = {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 100.0}
            text = {**TEXT, "num_hidden_layers": 1, "rope_parameters": rope}
            vision = {"embed_dim": 16, "hidden_size": 32, "depth": 1, "num_heads": 2}
            return transformers.Qwen2VLConfig(text_config=text, vision_config=vision)

        return make_pair(transformers.Qwen2VLForConditionalGeneration, config)

    @pytest.mark.parametrize("rows", [2, 3, 4])
    @pytest.mark.parametrize("part", ["whole", "text"])
    def test_documents_are_isolated(self, rows: int, part: str) -> None:
        eager, ours = self.models()
        if part == "text":
            eager, ours = eager.model.language_model, ours.model.language_model
        places = PACKED if rows == 2 else PACKED.expand(rows, 1, 12)
        assert_close(hidden(ours, tokens(1), position_ids=places, use_cache=False), alone(eager, tokens(1)), **CLOSE)

    #: Two tokens, an image of 2 x 3 parts, two tokens; and a second document of two tokens.
    IMAGE = torch.tensor(
        [
            [0, 1, 2, 2, 2, 2, 2, 2, 5, 6, 0, 1],
            [0, 1, 2, 2, 2, 3, 3, 3, 5, 6, 0, 1],
            [0, 1, 2, 3, 4, 2, 3, 4, 5, 6, 0, 1],
        ]
    )[:, None]

    def test_an_image_does_not_start_a_document(self) -> None:
        eager, ours = self.models()
        found = hidden(ours, tokens(1), position_ids=self.IMAGE, use_cache=False)
        for part in (slice(0, 10), slice(10, 12)):
            wanted = hidden(eager, tokens(1)[:, part], position_ids=self.IMAGE[..., part], use_cache=False)
            assert_close(found[:, part], wanted, **CLOSE)

    def test_time_that_goes_back_behind_an_image_is_refused(self) -> None:
        _, ours = self.models()
        places = self.IMAGE.clone()
        places[..., 8:] = 1
        with pytest.raises(LoweringError, match="several rows go back in time where no document starts; give four rows"):
            ours(tokens(1), position_ids=places, use_cache=False)

    def test_one_graph(self) -> None:
        eager, ours = self.models()
        text = ours.model.language_model
        compiled: Any = torch.compile(text, backend="eager", fullgraph=True)
        found = hidden(compiled, tokens(1), position_ids=PACKED.expand(3, 1, 12), use_cache=False)
        assert_close(found, alone(eager.model.language_model, tokens(1)), **CLOSE)
        torch.compiler.reset()


def test_images_next_to_packed_text_are_not_its_documents() -> None:
    """CLIP's images have as many tokens here as its text."""
    text = {**TEXT, "projection_dim": 16, "num_hidden_layers": 1}
    vision = {**VISION, "image_size": 11, "patch_size": 3, "projection_dim": 16, "num_hidden_layers": 1}
    eager, ours = make_pair(
        transformers.CLIPModel,
        lambda: transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=16),
    )
    pixels = torch.randn(1, 3, 11, 11)
    found = ours(input_ids=tokens(1, 10), position_ids=positions(4, 6), pixel_values=pixels)
    wanted = eager(input_ids=tokens(1, 10), pixel_values=pixels)
    assert_close(found.image_embeds, wanted.image_embeds, **CLOSE)
    last = eager.text_model(tokens(1, 10)[:, 4:]).last_hidden_state
    assert_close(found.text_model_output.last_hidden_state[:, 4:], last, **CLOSE)


class Prompted(torch.nn.Module):
    """What PEFT's prompt tuning does: tokens of its own before those of the caller, whose ``position_ids`` it drops."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.base_model, self.config = model, model.config

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, **kwargs: Any) -> Any:
        embeds = self.base_model.get_input_embeddings()(input_ids)
        inputs = {**kwargs, "inputs_embeds": torch.cat([torch.zeros(1, 3, embeds.shape[2]), embeds], 1)}
        return self.base_model(attention_mask=attention_mask, **{**inputs, "position_ids": None})


observe_tree(Prompted)


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_positions_that_a_wrapper_drops_are_refused(name: str) -> None:
    prompted = Prompted(pair(name)[1])
    assert prompted(tokens(1), position_ids=positions(12)).logits.shape == (1, 15, 64)
    message = rf"position_ids restart inside a row, and the model around {type(prompted.base_model).__name__}, as one of PEFT"
    with pytest.raises(LoweringError, match=message):
        prompted(tokens(1), position_ids=PACKED)
