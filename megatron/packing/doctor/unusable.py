"""tensor. Subjects that cannot be examined as they are: what is wrong, and what to do, in one line.

A verdict on a subject that does not do what it says would be wrong in silence: logits that do not
depend on the tokens never cross, and nothing is seen behind NaN.
"""

from __future__ import annotations

import sysconfig
import traceback
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from megatron.packing.doctor.subject import Step, Subject

_HERE = str(Path(__file__).parent)
_LIBRARIES = (_HERE, *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")))


class Unusable(ValueError):
    """A subject that cannot be examined as it is; the message stands by itself."""


def reason_of(error: BaseException) -> str:
    """Returns an error in one line: its kind, the first line of what it says, and where it was
    raised in the user's own files; what to do, where there is no GPU.
    """
    if isinstance(error, Unusable):
        return str(error)
    lines = str(error).strip().splitlines()
    text = f"{type(error).__name__}: {lines[0].rstrip('.')}" if lines else type(error).__name__
    if isinstance(error, SystemExit):
        text = f"sys.exit({error.code!r})"
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(("<", *_LIBRARIES))
    ]
    if frames and not isinstance(error, SyntaxError):  # which says it itself
        text += f" ({frames[-1].filename}:{frames[-1].lineno})"
    if ("CUDA" in text or "cuda" in text) and not torch.cuda.is_available():
        text += "; there is no GPU here: build it on the CPU, or run the doctor where there is one"
    return text


def check_subject(subject: object) -> None:
    """Raises Unusable for what is no subject, or has fields of other types."""
    if not isinstance(subject, Subject):
        raise Unusable(
            f"the function returned {type(subject).__name__}, not a "
            "megatron.packing.doctor.subject.Subject; return one"
        )
    if not isinstance(subject.model, nn.Module):
        raise Unusable(
            f"{subject.name}: Subject.model is a {type(subject.model).__name__}; pass the "
            "torch.nn.Module whose layers are to be watched"
        )
    if not isinstance(subject.vocab_size, int) or subject.vocab_size < 2:
        raise Unusable(
            f"{subject.name}: Subject.vocab_size is {subject.vocab_size!r}; pass the number of "
            "token ids that the embedding takes"
        )


def check_places(subject: Subject, sequences: Sequence[Tensor]) -> None:
    """Raises Unusable where rows of sequences cannot be rows of the stream."""
    rows, slots = subject.rows(sequences), subject.slots(sequences)
    lengths, expected = [len(places) for places in rows], [len(tokens) for tokens in sequences]
    if lengths != expected:
        raise Unusable(
            f"{subject.name}: Subject.places returned rows of {lengths} tokens for sequences of "
            f"{expected}; return the row of each token in the flattened stream"
        )
    every = torch.cat(list(rows))
    if int(every.min()) < 0 or int(every.max()) >= slots or len(every.unique()) < len(every):
        raise Unusable(
            f"{subject.name}: rows of sequences must differ and lie below Subject.num_slots "
            f"{slots}, but reach from {int(every.min())} to {int(every.max())}; count padding in "
            "num_slots, and give each token a row of its own"
        )


def check_windows(subject: Subject, declared: Sequence[str], layers: Sequence[str]) -> None:
    """Raises Unusable for windows of what is no layer: they would not be measured, in silence."""
    if absent := [name for name in declared if name not in layers]:
        raise Unusable(
            f"{subject.name}: Subject.windows names {', '.join(absent)}; the layers of this model "
            f"are {', '.join(layers) or 'not known, as it has no torch.nn.ModuleList of them'}"
        )


def check_logits(subject: Subject, logits: object, sequences: Sequence[Tensor]) -> None:
    """Raises Unusable unless there is one tensor [length, vocabulary] for each sequence."""
    wanted = "return one tensor [length, vocabulary] for each sequence, without its padding"
    expected = [len(tokens) for tokens in sequences]
    if not isinstance(logits, (list, tuple)):
        shape = f" of shape {list(logits.shape)}" if isinstance(logits, Tensor) else ""
        raise Unusable(
            f"{subject.name}: logits(sequences, fill) returned a {type(logits).__name__}{shape} "
            f"for sequences of {expected} tokens; {wanted}"
        )
    if all(isinstance(values, Tensor) for values in logits):
        shapes = [list(values.shape) for values in logits]
        if [shape[:1] for shape in shapes] != [[length] for length in expected]:
            raise Unusable(
                f"{subject.name}: logits(sequences, fill) returned tensors of lengths "
                f"{[shape[0] if shape else 0 for shape in shapes]} for sequences of {expected} "
                f"tokens; {wanted}"
            )
        if all(len(shape) == 2 for shape in shapes) and all(
            values.is_floating_point() for values in logits
        ):
            return
        kinds = ", ".join(
            f"{values.dtype} {shape}".removeprefix("torch.")
            for values, shape in zip(logits, shapes)
        )
    else:
        kinds = ", ".join(type(values).__name__ for values in logits)
    raise Unusable(f"{subject.name}: logits(sequences, fill) returned {kinds}; {wanted}, of floats")


def checked_loss(subject: Subject, loss: object, *, is_trained: bool = True) -> Tensor:
    """Returns the loss, or raises Unusable unless it is a scalar with a gradient.

    Args:
        subject: whose loss it is.
        loss: what `Subject.loss` returned.
        is_trained: whether tokens of each pack are trained, so that it must be finite.
    """
    is_scalar = isinstance(loss, Tensor) and loss.numel() == 1
    if isinstance(loss, Tensor) and is_scalar and loss.requires_grad:
        if bool(loss.isfinite()) or not is_trained:
            return loss
        what = f"{float(loss)}"
    elif isinstance(loss, Tensor):
        what = f"a tensor {list(loss.shape)}{' without a gradient' * is_scalar}"
    else:
        what = f"a {type(loss).__name__}"
    raise Unusable(
        f"{subject.name}: Subject.loss returned {what}; return the finite scalar tensor that the "
        "trainer calls backward on"
    )


def checked_step(subject: Subject, step: object) -> Step:
    """Returns the step, or raises Unusable unless it is one."""
    if not isinstance(step, Step):
        raise Unusable(
            f"{subject.name}: Subject.step returned a {type(step).__name__}; return a "
            "megatron.packing.doctor.subject.Step"
        )
    return step
