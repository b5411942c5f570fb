"""What is said of each source in a log line."""

import math

from megatron.sft.report.source_metrics import SourceMetrics, dropped_line, sources_line


def source(tokens, loss=1.5):
    return SourceMetrics(sequences=2, tokens=tokens, num_loss_tokens=0 if math.isnan(loss) else 4, loss=loss)


def test_sources_line():
    """A thousand sources must not make a line of a thousand losses; those of most tokens are told."""
    assert sources_line({"few": source(10, math.nan), "most": source(2000)}) == (
        "most 1.5000 (2 samples, 2,000 tokens), few (2 samples, 10 tokens)"
    )
    many = sources_line({f"s{number}": source(number) for number in range(1000)})
    assert many.startswith("s999 1.5000")
    assert many.endswith("s996 1.5000 (2 samples, 996 tokens), 996 more")


def test_dropped_line():
    """Without reason and source nobody knows which file to mend."""
    assert dropped_line({"chats": {"over length": 1200, "bad sample": 1}, "web": {"bad sample": 2}}) == (
        "1,200 over length of chats, 1 bad sample of chats, 2 bad sample of web"
    )
