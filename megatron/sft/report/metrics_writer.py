"""pure. Writes the metrics of a running run: to `metrics.jsonl`, to boards, and to the terminal, as
a progress bar or as log lines.
"""

import math
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron.sft.report.boards import Board
from megatron.sft.report.line_file import LineFile
from megatron.sft.report.metrics import (
    DERIVED,
    DRAWN,
    DRAWN_OF_EVALUATIONS,
    Evaluation,
    StepMetrics,
    answer_line,
)
from megatron.sft.report.metrics_file import METRICS_FILE, json_line, truncate_after


class MetricsWriter:
    """Writer of a run's metrics, on rank 0. Each call costs one small write, and does not wait for
    the GPU.
    """

    def __init__(
        self,
        run_dir: Path | str,
        *,
        train_iters: int,
        log_interval: int,
        resume_iteration: int | None = None,
        boards: Sequence[Board] = (),
    ) -> None:
        """Opens the file.

        Args:
            log_interval: steps between two log lines, if stderr is not a terminal.
            resume_iteration: step that the run resumes after; lines of later steps are removed.
                None for a new run, whose file starts empty.
            boards: they are closed together with the file.
        """
        path = Path(run_dir) / METRICS_FILE
        path.parent.mkdir(parents=True, exist_ok=True)
        truncate_after(path, -1 if resume_iteration is None else resume_iteration)
        self._file = LineFile(path)
        self._boards = list(boards)
        self._train_iters = train_iters
        self._log_interval = log_interval
        self._bar = (
            progress_bar(train_iters, resume_iteration or 0) if sys.stderr.isatty() else None
        )

    def step(self, metrics: StepMetrics) -> None:
        """Writes and shows one training step."""
        derived = {name: getattr(metrics, name) for name in DERIVED}
        # Columns in the order of StepMetrics; those of its base class PackingStats come last.
        values = dict.fromkeys(StepMetrics.__annotations__) | asdict(metrics) | derived
        if not metrics.delays:
            del values["delays"], values["waiting"]
        self._file.write(json_line("train", **values))
        drawn = {f"train/{name}": getattr(metrics, name) for name in DRAWN}
        drawn |= {f"train/loss of {name}": source.loss for name, source in metrics.sources.items()}
        drawn |= {f"train/{name}": value for name, value in metrics.figures.items()}
        self._add_to_boards(drawn, metrics.iteration)
        if self._bar is not None:
            self._bar.set_postfix_str(metrics.to_postfix(), refresh=False)
            self._bar.update(metrics.iteration - self._bar.n)
        elif metrics.iteration % self._log_interval == 0:
            print(metrics.to_line(self._train_iters), flush=True)

    def evaluation(self, evaluation: Evaluation) -> None:
        """Writes and shows the loss over held-out data."""
        drawn = {name: getattr(evaluation, name) for name in DRAWN_OF_EVALUATIONS}
        self._file.write(json_line("evaluation", **asdict(evaluation) | drawn))
        self._add_to_boards(
            {
                f"{evaluation.split}/{name}": value
                for name, value in {**drawn, **evaluation.figures}.items()
                if math.isfinite(value)
            },
            evaluation.iteration,
        )
        self._say(evaluation.to_line())

    def answers(self, iteration: int, answers: Sequence[tuple[str, str]]) -> None:
        """Writes and shows the model's answers, as pairs (prompt, answer)."""
        pairs = [{"prompt": prompt, "answer": answer} for prompt, answer in answers]
        self.event("answers", iteration=iteration, answers=pairs)
        for prompt, answer in answers:
            self._say(f"answer after step {iteration} | {answer_line(prompt, answer)}")

    def _say(self, line: str) -> None:
        if self._bar is not None:
            self._bar.write(line)
        else:
            print(line, flush=True)

    def event(self, name: str, **fields: object) -> None:
        """Writes an event: `event("run", iteration=0, seq_length=1024, global_batch_size=16)`.

        If it has an `iteration`, a run that resumes before that step removes it.
        """
        self._file.write(json_line("event", event=name, **fields))

    def _add_to_boards(self, values: dict[str, float], iteration: int) -> None:
        for board in [*self._boards]:  # a copy, as a board that fails is removed
            try:
                board.add(values, iteration)
            except Exception as error:
                # A run must not end for any error of a board's library, files or service.
                self._boards.remove(board)
                print(f"note: {_failed(board, error)}; training continues without it", flush=True)

    def close(self) -> None:
        """Closes the file, the boards and the progress bar."""
        self._file.close()
        for board in self._boards:
            try:
                board.close()
            except Exception as error:
                print(f"note: {_failed(board, error)}", flush=True)
        if self._bar is not None:
            self._bar.close()


def _failed(board: Board, error: Exception) -> str:
    return (
        f"{type(board).__name__} failed ({type(error).__name__}: "
        f"{' '.join(str(error).split()):.200})"
    )


def progress_bar(train_iters: int, done: int) -> Any:
    """Returns a bar over the run's steps on stderr."""
    from tqdm import tqdm

    return tqdm(total=train_iters, initial=done, unit="step", dynamic_ncols=True)
