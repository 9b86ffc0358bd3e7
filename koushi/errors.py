"""Error types whose text says what a user can do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from signal import SIGPIPE


@dataclass(frozen=True, order=True)
class Problem:
    """One thing wrong with a run file.

    ``where`` is ``file:line:column`` (or ``command line``), ``key`` the dotted key path (empty
    for the file as a whole), ``what`` what is wrong with the value, ``legal`` what would be right.
    ``option`` is the short option that set the key, as written with its value.
    """

    where: str
    key: str
    what: str
    legal: str = ""
    option: str = ""

    def __str__(self) -> str:
        text = f"{self.option} ({self.key}): " if self.option else f"{self.where}: "
        if self.key and not self.option:
            text += f"{self.key}: "
        text += self.what
        return f"{text}; {self.legal}" if self.legal else text


class KoushiError(Exception):
    """Base of every error that a user can mend; ``exit_code`` is what the command ends with.

    It is 2 where what was given has to change, 1 where the same command can go well another time.

    Without a text where the command's output has said it already.
    """

    exit_code = 1


class ConfigError(KoushiError):
    """Every problem found in a run file, together."""

    exit_code = 2

    def __init__(self, problems: Sequence[Problem]):
        assert problems, "a ConfigError needs at least one problem"
        self.problems = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))


class WrongTarget(KoushiError):
    """A file that a command was told to write and must not, or cannot."""

    exit_code = 2


class DataError(KoushiError):
    """Training data or a tokenizer that cannot be used."""

    exit_code = 2


class WeightsError(KoushiError):
    """A model's folder or weights that cannot be used, every reason on a line of its own."""

    exit_code = 2

    def __init__(self, reasons: Sequence[str]):
        assert reasons, "a WeightsError needs at least one reason"
        self.reasons = tuple(reasons)
        super().__init__("\n".join(reasons))


class TrainingError(KoushiError):
    """Training cannot start or go on (a device that is not there, a non-finite loss)."""


class RunRefused(TrainingError):
    """A run as it was asked for, whatever the machine does: a world of another size, a folder that is taken."""

    exit_code = 2


class DoesNotFit(KoushiError):
    """A run that has no room where it would start."""

    exit_code = 3


class CheckpointError(KoushiError):
    """A checkpoint that cannot be written, read or used."""


class WrongCheckpoint(CheckpointError):
    """A path that names none, or one that is whole and not for what was asked: of another model or version."""

    exit_code = 2


class DamagedCheckpoint(CheckpointError):
    """A checkpoint that is not as it was written: truncated, altered or incomplete."""


class RankFailure(KoushiError):
    """A rank raised, was killed or left; the text begins with the first failure."""


class Stopped(KoushiError):
    """A signal from outside (Ctrl-C, SIGTERM) ended the run; every rank is gone."""

    def __init__(self, signal_number: int, signal_name: str):
        self.exit_code = 128 + signal_number
        super().__init__(f"stopped by {signal_name}")


class ReaderGone(KoushiError):
    """Nothing reads what a command prints any more, as after ``| head``; nobody is left to be told."""

    exit_code = 128 + SIGPIPE


class VerifyError(KoushiError):
    """A layout that does not train as one process does."""


class AuditFailed(KoushiError):
    """Collectives that break the rules of the lattice, every finding on a line of its own."""


class NotAsPlanned(KoushiError):
    """A dry run that did something else than was planned, both sides on a line of its own."""
