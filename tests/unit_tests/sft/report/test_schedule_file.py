"""What --dump-schedule writes must be read by the planner and open in a browser."""

import importlib.util

from megatron.packing.batch.layout import Alignment
from megatron.packing.scheduling.cost import PackCost
from megatron.packing.scheduling.step_time import StepModel
from megatron.planner.lengths import Tokenization
from megatron.planner.step_record import StepLayout, StepRecord
from megatron.sft.data.length_sources import lengths_from
from megatron.sft.report.schedule_file import dump_schedule


def test_files_of_a_step(tmp_path):
    layout = StepLayout(
        num_ranks=2, capacity=9, alignment=Alignment(), cost=PackCost(1.0, 0.1), model=StepModel()
    )  # fmt: skip
    record = StepRecord(title="step 7", scheduler="default", layout=layout, packs=[[[3, 4], [9]], [[8], []]])
    names = [path.name for path in dump_schedule(tmp_path / "schedule_7", record)]
    plotted = importlib.util.find_spec("matplotlib") is not None
    assert names == ["schedule_7.json", "schedule_7.html", *["schedule_7.png"] * plotted]
    assert all((tmp_path / name).stat().st_size > 100 for name in names)
    tokenization = Tokenization(
        tokenizer_type="ByteLevelTokenizer", tokenizer_model=None, vocab_size=None, skip_bad_samples=False
    )  # fmt: skip
    assert lengths_from(str(tmp_path / "schedule_7.json"), tokenization, None, 0, 1).record == record
