"""``flexmask hf``: commands that check and draw the masks of models of transformers, given their configs."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import click
import transformers

from flexmask import Mask
from flexmask.cli.inputs import json_option, output_option, writing
from flexmask.cli.output import Cell, UserError, echo, print_json, print_table, spinner, to_stderr

__all__ = ["hf"]

CONFIG = click.argument("config", metavar="CONFIG.json", type=click.Path(path_type=Path))


@click.group()
def hf() -> None:
    """Models of Hugging Face Transformers: which masks they use, and whether packed documents leak.

    A model is made from its CONFIG.json, or from the folder that has it, with two layers and random weights; nothing is
    downloaded.
    """


@hf.command()
@CONFIG
@click.option(
    "--attention",
    "implementations",
    multiple=True,
    metavar="NAME",
    help="An attn_implementation, several times. [default: eager, sdpa, flex_attention, flexmask]",
)
@json_option("a list of the results")
@click.pass_context
def check(ctx: click.Context, config: Path, implementations: tuple[str, ...], as_json: bool) -> None:
    """Check whether documents that are packed into one row see each other.

    Packs documents in each way that trainers do: with position_ids that restart, without and with a cache, with a 2-D mask, with
    cu_seq_lens and with seq_idx. A document leaks where another one's output changes with its tokens.

    Exits with 0 if no documents leak, with 1 if some do, and with 2 for bad input.

    \b
    Examples:
      flexmask hf check config.json
      flexmask hf check config.json --attention flexmask --attention sdpa
    """
    from flexmask_transformers.check import IMPLEMENTATIONS, check_packing

    with _questions(), spinner("packing documents"):
        found = check_packing(config, attention=implementations or IMPLEMENTATIONS)
    if as_json:
        print_json([{**vars(result), "positions": list(result.positions)} for result in found.results])
    else:
        rows = [(one.attention, one.packed_by, Cell(str(one), "red" if one.positions else "green")) for one in found.results]
        print_table(rows, ["attention", "packed by", "result"])
    if found.leaks or all(one.error for one in found.results):
        ctx.exit(1)


@hf.command()
@CONFIG
@click.option(
    "--text", "texts", multiple=True, required=True, help="A document, of which each word is a token; several are packed."
)
@click.option(
    "--attention",
    type=click.Choice(["flexmask", "sdpa", "eager"]),
    default="flexmask",
    help="The attn_implementation. [default: flexmask]",
)
@click.option("--layer", metavar="NAME|N", help="Draw the mask of this layer alone. [default: each mask once]")
@click.option("--why", is_flag=True, help="Color each hidden cell by the term of the mask that masks it out.")
@output_option("instead of drawing in the terminal")
def render(
    config: Path,
    texts: tuple[str, ...],
    attention: Literal["flexmask", "sdpa", "eager"],
    layer: str | None,
    why: bool,
    output: Path | None,
) -> None:
    """Draw the masks of a model for some texts, with their words on the axes.

    \b
    Examples:
      flexmask hf render config.json --text "The cat sat down"
      flexmask hf render config.json --text "A first document" --text "and a second one" --layer 0 -o masks.html
    """
    words = [text.split() for text in texts]
    if not all(words):
        raise UserError("a --text has no word")
    with _questions(), spinner("running the model"):
        masks = _masks(config, [len(document) for document in words], attention)
    chosen = _chosen(masks, layer, sum(map(len, words)))
    if output is not None and len(chosen) > 1:
        raise UserError(f"the layers have {len(chosen)} masks, and a file has one; choose with --layer, from {', '.join(masks)}")
    tokens = [word for document in words for word in document]
    options: dict[str, Any] = {"tokens": tokens, **({"why": True} if why else {})}
    for name, mask in chosen.items():
        if output is not None:
            with writing(output):
                mask.save_picture(output, len(tokens), **options)
            return
        echo(click.style(name, bold=True))
        mask.show(len(tokens), **options)


def _masks(config: Path, lengths: list[int], attention: Literal["flexmask", "sdpa", "eager"]) -> dict[str, Mask]:
    """The mask of each layer for documents that are packed into one row."""
    import torch

    from flexmask_transformers.models import small_model
    from flexmask_transformers.recording import masks_of

    positions = torch.cat([torch.arange(length, device="cpu") for length in lengths])[None]
    packed: dict[str, Any] = {"position_ids": positions} if len(lengths) > 1 else {}
    model = small_model(config)
    return masks_of(model, attention=attention, input_ids=torch.ones_like(positions), use_cache=False, **packed)


def _chosen(masks: dict[str, Mask], layer: str | None, length: int) -> dict[str, Mask]:
    """The mask of a layer; or each mask once, under the names of its layers, where masks that show the same cells are one."""
    if layer is not None:
        names = [name for number, name in enumerate(masks) if layer in (name, str(number))]
        if not names:
            raise UserError(f"there is no layer {layer!r}; the layers are {', '.join(masks)}")
        return {names[0]: masks[names[0]]}
    groups: list[list[str]] = []
    for name, mask in masks.items():
        same = next(
            (names for names in groups if str(masks[names[0]]) == str(mask) and masks[names[0]].equals(mask, length)), None
        )
        if same is None:
            groups.append([name])
        else:
            same.append(name)
    return {names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else ""): masks[names[0]] for names in groups}


@contextmanager
def _questions() -> Iterator[None]:
    """Keeps the output of transformers out of the results, and turns its errors into messages."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        with to_stderr(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except (ImportError, OSError, ValueError) as error:
        raise UserError(str(error).strip().partition("\n")[0]) from error
