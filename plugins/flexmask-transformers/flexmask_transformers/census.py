"""What becomes of every model class of transformers with ``attn_implementation="flexmask"``.

    python -m flexmask_transformers.census FILE.tsv [CLASS...]

makes a tiny model of each class, with random weights and without downloads, and compares flexmask with ``eager``: for a row, for
rows with padding, generated tokens, and for packed rows with each document alone. A line is appended to the file for each class
that it does not have yet. The model types of the file are printed by what becomes of packed rows. It exits with 1 if documents
leak, numbers differ, errors are not flexmask's, or rows are refused that would be isolated.
"""

from __future__ import annotations

import inspect
import multiprocessing
import os
import resource
import signal
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from textwrap import fill
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

import flexmask
from flexmask.errors import FlexmaskError
from flexmask_transformers.check import leaks
from flexmask_transformers.layers import allow_mixing, layers_of
from flexmask_transformers.recording import using
from flexmask_transformers.tiny import inputs_of, tiny_model, tokens

__all__ = ["Entry", "class_names", "examine", "main", "read", "summary"]

#: The documents of a packed row: no other size of a model is their sum.
LENGTHS = (8, 11)
#: How much an output may change with other documents, and differ from eager, relative to the largest output.
LEAK, DIFFERENCE = 1e-4, 2e-3
#: The seconds of a processor and the bytes of memory that a class may take, and the classes that share a process.
SECONDS, MEMORY, BATCH = 10, 8 << 30, 50
#: What is said of a model type some of whose classes have these results; the first that fits.
GROUPS = {
    "Isolated, or an error in some of its classes": {"isolated", "refused"},
    "Isolated": {"isolated"},
    "Packed rows are an error": {"refused"},
    "flexmask is an error": {"no attention"},
    "Has no packed rows": {"plain same"},
}
#: Classes that are refused for what the census does not give: Evolla's adapters attend to one protein for all documents of a row.
CONDITIONED = {"EvollaForProteinText2Text", "EvollaModel"}
#: Results that must not be.
FAULTS = ("LEAK", "DIFFERENT", "ERROR", "REFUSED")


class Entry(NamedTuple):
    """What becomes of a class: ``same``, ``isolated``, ``refused``, one of `FAULTS`, or ``-`` where ``reason`` says why.

    Attributes:
        name: the class.
        family: the model type of its config.
        plain: a row of tokens, or an image.
        padded: three rows, two of which have padding, on the right and on the left.
        generated: the logits of generated tokens.
        packed: documents that are packed into a row by ``position_ids`` that restart at the model's first position, without a
            cache. ``REFUSED`` where they would be isolated.
        reason: the first error, or what differs.
    """

    name: str
    family: str = ""
    plain: str = "-"
    padded: str = "-"
    generated: str = "-"
    packed: str = "-"
    reason: str = ""

    @property
    def is_fault(self) -> bool:
        """Whether a result is one of `FAULTS`."""
        return any(result in FAULTS for result in self[2:6])


def class_names() -> list[str]:
    """The model classes of the installed transformers, some of which may need other packages."""
    modules: Mapping[str, str] = transformers._class_to_module  # of its lazy module
    names = (name for name, module in modules.items() if "models." in module and ".modeling_" in f".{module}")
    return sorted(name for name in names if not name.startswith("Auto") and not name.endswith("PreTrainedModel"))


def read(path: Path) -> dict[str, Entry]:
    """The entries of a file."""
    lines = path.read_text().splitlines() if path.exists() else []
    entries = (Entry(*line.split("\t")) for line in lines if not line.startswith(("#", "name\t")))
    return {entry.name: entry for entry in entries}


def summary(entries: Iterable[Entry]) -> str:
    """The model types in Markdown, by what becomes of packed rows."""
    types: dict[str, set[str]] = {}
    for entry in entries:
        results = {entry.packed} if entry.packed != "-" else {f"plain {entry.plain}"}
        types.setdefault(entry.family, set()).update({"no attention"} if entry.plain == "refused" else results)
    groups: dict[str, list[str]] = {title: [] for title in GROUPS}
    for family, found in sorted(types.items()):
        title = next((title for title, wanted in GROUPS.items() if wanted <= found), None)
        if title is not None:
            groups[title].append(family)
    return "\n\n".join(
        fill(f"**{title}** ({len(names)}): {', '.join(names)}.", 130, break_on_hyphens=False)
        for title, names in groups.items()
        if names
    )


def examine(name: str) -> Entry | None:
    """What becomes of a class, in this process; None where the name is not one of a model that runs."""
    kind = getattr(transformers, name)
    is_model = isinstance(kind, type) and issubclass(kind, PreTrainedModel) and getattr(kind, "config_class", None)
    if not is_model or kind.forward is PreTrainedModel.forward:
        return None
    entry = Entry(name, getattr(kind.config_class, "model_type", ""))
    try:
        model, inputs, outputs = _running_model(kind)
    except RuntimeError as error:
        return entry._replace(reason=str(error))
    found = _Found()
    plain = found.compare(model, lambda: _outputs(model, inputs), outputs)
    padded = generated = packed = "-"
    if "input_ids" in inputs:
        padded = found.compare(model, lambda: _padded(model, inputs))
        if model.can_generate():
            generated = found.compare(model, lambda: _generated(model, inputs))
        packed = _packed(model, inputs, found)
    else:
        found.reasons.append("takes no tokens")
    return entry._replace(plain=plain, padded=padded, generated=generated, packed=packed, reason="; ".join(found.reasons))


def _running_model(kind: Any) -> tuple[Any, dict[str, Any], list[Tensor]]:
    """The first tiny model of a class that runs with eager, its inputs and outputs.

    Raises:
        RuntimeError: none does; with the error of the first try.
    """
    errors = []
    for heads in (2, 4, None):
        try:
            model = tiny_model(kind, heads=heads)
        except Exception as error:  # whatever a config or model raises for sizes that do not fit it
            errors.append(f"cannot be shrunk: {_line(error)}")
            continue
        for inputs in inputs_of(model, sum(LENGTHS)):
            try:
                return model, inputs, _outputs(model, inputs)
            except Exception as error:  # the same for inputs
                errors.append(f"does not run with eager: {_line(error)}")
    raise RuntimeError(errors[0] if errors else "takes neither tokens nor images nor sound")


class _Found:
    """The comparisons of a model, and why they did not come out as they should."""

    def __init__(self) -> None:
        self.reasons: list[str] = []

    def compare(self, model: Any, run: Callable[[], list[Tensor]], wanted: list[Tensor] | None = None) -> str:
        """How flexmask's outputs compare with those of eager."""
        try:
            wanted = wanted or run()
        except Exception as error:  # eager's own
            self.reasons.append(f"eager: {_line(error)}")
            return "-"
        try:
            with using(model, "flexmask"):
                found = run()
        except Exception as error:  # whatever is raised instead of a result
            return self.refused(error)
        if len(found) != len(wanted):
            self.reasons.append(f"{len(found)} outputs in place of {len(wanted)}")
            return "DIFFERENT"
        return self.same(found, wanted)

    def refused(self, error: Exception) -> str:
        self.reasons.append(_line(error))
        return "refused" if isinstance(error, FlexmaskError) or "flexmask" in str(error) else "ERROR"

    def same(self, found: Sequence[Tensor], wanted: Sequence[Tensor]) -> str:
        for own, eager in zip(found, wanted, strict=True):
            if own.shape != eager.shape:
                self.reasons.append(f"shape {list(own.shape)} in place of {list(eager.shape)}")
                return "DIFFERENT"
            apart = float((own - eager).abs().max()) / max(1e-6, float(eager.abs().max())) if eager.numel() else 0.0
            if not apart < DIFFERENCE and not own.equal(eager):
                self.reasons.append(f"differs by {apart:.2g}")
                return "DIFFERENT"
        return "same"


def _padded(model: Any, inputs: dict[str, Any]) -> list[Tensor]:
    """The outputs at the real tokens of three rows, two of which have padding on the right and on the left."""
    length = sum(LENGTHS)
    keep = torch.ones(3, length, dtype=torch.int64, device="cpu")
    keep[1, length - 3 :] = keep[2, :3] = 0
    rows = {name: value.expand(3, *value.shape[1:]) for name, value in inputs.items()}
    return [output[keep.bool()] for output in _token_outputs(model, {**rows, "attention_mask": keep}, length)]


def _generated(model: Any, inputs: dict[str, Any]) -> list[Tensor]:
    given = {name: value for name, value in inputs.items() if name != "decoder_input_ids"}
    options: dict[str, Any] = {"max_new_tokens": 3, "min_new_tokens": 3, "do_sample": False, "pad_token_id": 0, "num_beams": 1}
    if model.config.is_encoder_decoder:
        options["decoder_start_token_id"] = 1
    torch.manual_seed(0)
    found = model.generate(**given, **options, output_logits=True, return_dict_in_generate=True)
    return [torch.nan_to_num(part.float(), neginf=0.0) for part in found.logits]


def _packed(model: Any, inputs: dict[str, Any], found: _Found) -> str:
    """What becomes of packed rows."""
    length, names = sum(LENGTHS), inspect.signature(model.forward).parameters
    layers = layers_of(model)
    assert layers is not None
    positions = torch.cat([torch.arange(one, device="cpu") for one in LENGTHS])[None] + layers.first_position
    options = {"use_cache": False} if "use_cache" in names or hasattr(model.config, "use_cache") else {}
    of_tokens = [name for name, value in inputs.items() if value.shape[1] == length]

    def run(ids: Tensor, start: int = 0) -> Tensor:
        stop = start + ids.shape[1]
        given = {name: value[:, start:stop] if name in of_tokens else value for name, value in inputs.items()}
        given |= {name: ids for name in ("input_ids", "decoder_input_ids") if name in inputs}
        outputs = _token_outputs(model, {**given, "position_ids": positions[:, start:stop], **options}, stop - start)
        return torch.cat([output.reshape(1, stop - start, -1) for output in outputs], 2)

    ids, others = tokens(model, length, 1), tokens(model, length, 2)
    try:
        alone = torch.cat([run(ids[:, start:stop], start) for start, stop in pairwise(accumulate(LENGTHS, initial=0))], 1)
    except Exception as error:  # eager's own
        found.reasons.append(f"packed, eager: {_line(error)}")
        return "-"
    try:
        with using(model, "flexmask"):
            packed, leak = leaks(run, ids, others, LENGTHS)
    except Exception as error:  # whatever is raised instead of a result
        result = found.refused(error)
        is_needless = "allow_mixing" in str(error) and type(model).__name__ not in CONDITIONED
        return "REFUSED" if is_needless and _is_isolated(model, run, ids, others) else result
    if not float(leak.max()) < LEAK * float(packed.abs().max()):
        found.reasons.append(f"packed, leaks by {float(leak.max() / packed.abs().max()):.2g}")
        return "LEAK"
    result = found.same([packed], [alone])
    return "isolated" if result == "same" else result


def _is_isolated(model: Any, run: Callable[[Tensor], Tensor], ids: Tensor, others: Tensor) -> bool:
    """Whether documents are isolated in a model that allows other layers than attention."""
    allow_mixing(model)
    try:
        with using(model, "flexmask"):
            packed, leak = leaks(run, ids, others, LENGTHS)
    except Exception:  # it is refused, for a further reason
        return False
    return float(leak.max()) < LEAK * float(packed.abs().max())


def _outputs(model: Any, inputs: dict[str, Any]) -> list[Tensor]:
    """All tensors of numbers that a model gives, also of the models in it, but no weights of attention."""
    torch.manual_seed(0)
    with torch.no_grad():
        found = model(**inputs)
    return [part.float() for part in _tensors(found) if part.is_floating_point()]


def _token_outputs(model: Any, inputs: dict[str, Any], length: int) -> list[Tensor]:
    """The outputs ``float[B, length, ...]`` for each token; those of the layers where the model gives others alone."""
    for options in ({}, {"output_hidden_states": True}):
        found = [output for output in _outputs(model, {**inputs, **options}) if output.shape[1:2] == (length,)]
        if found:
            return found
    raise ValueError("no output for each token")


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for name, part in value.items():
            yield from () if "attentions" in name else _tensors(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _tensors(part)


def _line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def _examine_apart(names: Sequence[str]) -> Iterator[Entry | None]:
    """What becomes of each class, in other processes, which a class may end in other ways than this one."""
    context, done = multiprocessing.get_context("fork"), 0
    while done < len(names):
        receiver, sender = context.Pipe(duplex=False)
        worker = context.Process(target=_examine_into, args=(names[done : done + BATCH], sender), daemon=True)
        worker.start()
        sender.close()
        for name in names[done : done + BATCH]:
            done += 1
            try:
                yield receiver.recv()
            except EOFError:
                worker.join()
                ended = f"its process ended with {worker.exitcode}"
                yield Entry(name, reason=f"takes {SECONDS} s" if worker.exitcode == -signal.SIGPROF else ended)
                break
        worker.join()


def _examine_into(names: Sequence[str], sender: Any) -> None:
    """Sends what becomes of each class."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(1, 2)
    warnings.simplefilter("ignore")
    for name in names:
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        try:
            found = examine(name)
        except Exception as error:  # of an import, or of the census itself
            found = Entry(name, reason=f"cannot be examined: {_line(error)}")
        sender.send(found)


def main(arguments: Sequence[str]) -> int:
    """Examines the classes, or those of the arguments, that the file does not have; 1 if there are faults."""
    path, names = Path(arguments[0]), list(arguments[1:]) or class_names()
    known = read(path)
    if not path.exists():
        versions = f"# transformers {transformers.__version__}, torch {torch.__version__}, flexmask {flexmask.__version__}"
        path.write_text("\n".join([versions, "\t".join(Entry._fields)]) + "\n")
    for entry in _examine_apart([name for name in names if name not in known]):
        if entry is not None:
            with path.open("a") as file:
                file.write("\t".join(entry) + "\n")
            if entry.is_fault:
                print(*entry, sep="  ", flush=True)
    entries = list(read(path).values())
    print(summary(entries))
    return 1 if any(entry.is_fault for entry in entries) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
