"""Clips of video and audio; frames, shapes and times were compared with energon 7.4.1's decoder on
the same files.
"""

import io
import math
import sys
import wave

import numpy as np
import pytest

from megatron.blending.energon._encoding.decode import SampleDecoder, decode_part
from megatron.blending.formats.decode import DecodeError

FRAMES_PER_SECOND, NUM_FRAMES = 10, 25


@pytest.fixture(scope="module")
def video():
    """25 frames of one grey each, ten times their number."""
    av = pytest.importorskip("av")
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("mpeg4", rate=FRAMES_PER_SECOND)
        stream.width, stream.height, stream.pix_fmt, stream.gop_size = 32, 16, "yuv420p", 4
        for number in range(NUM_FRAMES):
            grey = np.full((16, 32, 3), number * 10, np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(grey, format="rgb24")))
        container.mux(stream.encode(None))
    return file.getvalue()


@pytest.fixture(scope="module")
def audio():
    """2.5 seconds of counting up, at 8000 samples a second."""
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(1)
        writer.setsampwidth(2)
        writer.setframerate(8000)
        writer.writeframes(np.arange(20000, dtype=np.int16).tobytes())
    return file.getvalue()


def numbers(clip):
    return [round(float(frame.double().mean()) / 10) for frame in clip]


@pytest.mark.parametrize(
    ("unit", "first", "last", "frames", "times"),
    [
        ("seconds", 0, math.inf, range(25), (0.0, 2.5)),
        ("seconds", 0.5, 0.8, range(5, 9), (0.5, 0.9)),
        ("seconds", 1.01, 1.01, [10], (1.0, 1.1)),
        ("seconds", 1.05, 1.2, range(10, 13), (1.0, 1.3)),
        ("seconds", 2.4, 3, [24], (2.4, 2.5)),
        ("frames", 3, 5, range(3, 6), (0.3, 0.6)),
        ("frames", 0, 0, [0], (0.0, 0.1)),
        ("frames", 20, 100, range(20, 25), (2.0, 2.5)),
    ],
)
def test_video_clips(video, unit, first, last, frames, times):
    """A clip that starts at a key frame instead of where it was asked to shows another scene."""
    pytest.importorskip("av")
    (clip,), (shown,) = decode_part("mp4", video).get_video_clips([(first, last)], unit)
    assert (str(clip.dtype), tuple(clip.shape[1:])) == ("torch.uint8", (3, 16, 32))
    assert numbers(clip) == list(frames)
    assert shown == pytest.approx(times)


def test_several_clips_and_another_size(video):
    """Each range is a clip of its own, in the order asked for."""
    pytest.importorskip("av")
    clips, _ = decode_part("a.MP4", video).get_video_clips([(20, 21), (2, 2)], "frames", (8, 4))
    assert [numbers(clip) for clip in clips] == [[20, 21], [2]]
    assert clips[1].shape == (1, 3, 4, 8)


@pytest.mark.parametrize(
    ("unit", "first", "last", "samples"),
    [
        ("seconds", 0, math.inf, (0, 20000)),
        ("seconds", 0.5, 0.75, (4000, 6000)),
        ("samples", 100, 199, (100, 199)),
    ],
)
def test_audio_clips(audio, unit, first, last, samples):
    """Audio that is off by a codec's frame does not go with its transcript."""
    pytest.importorskip("av")
    (clip,), (played,) = decode_part("wav", audio).get_audio_clips([(first, last)], unit)
    assert clip.tolist() == [list(range(*samples))]
    assert played == pytest.approx((samples[0] / 8000, samples[1] / 8000))


def test_everything(video, audio):
    """What a file does not have is empty, not an error, where all of it is asked for."""
    pytest.importorskip("av")
    seen = decode_part("mp4", video).get_frames(video_decode_audio=True)
    assert (len(seen.video_clips), len(seen.audio_clips)) == (1, 0)
    heard = decode_part("wav", audio).get_frames()
    assert (len(heard.video_clips), len(heard.audio_clips), heard.audio_timestamps) == (
        0,
        1,
        [(0.0, 2.5)],
    )


def test_misuse(video, audio):
    """Errors of PyAV speak of streams and packets."""
    pytest.importorskip("av")
    with pytest.raises(ValueError, match="the file has no video"):
        decode_part("wav", audio).get_video()
    with pytest.raises(ValueError, match=r"no frame is shown from 9\.000 to 10\.000 seconds"):
        decode_part("mp4", video).get_video_clips([(9, 10)])
    with pytest.raises(ValueError, match="unit must be seconds or frames, but is 'samples'"):
        decode_part("mp4", video).get_video_clips([(0, 1)], "samples")


def test_other_ways_to_decode(video):
    """`av_decode` of a task encoder's SampleDecoder."""
    pytest.importorskip("av")
    assert numbers(SampleDecoder(av_decode="torch")("mp4", video).video_clips[0]) == list(range(25))
    with SampleDecoder(av_decode="pyav")("mp4", video) as container:
        assert container.streams.video[0].frames == NUM_FRAMES


def test_without_pyav(monkeypatch):
    """PyAV is not needed but for video and audio."""
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(DecodeError, match="part 'mp4': needs av, which is not installed here"):
        decode_part("mp4", b"")
