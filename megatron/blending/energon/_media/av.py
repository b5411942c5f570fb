"""tensor. An AVDecoder decodes video and audio on demand, as far as a sample needs it. It needs
PyAV.

Frames are uint8 of shape [frames, 3, height, width], audio is [channels, samples] in the type that
it is stored in.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, BinaryIO, TypeVar

import numpy as np
import torch

from megatron.blending.arguments import shown

T = TypeVar("T")
Range = tuple[float, float]
Clips = tuple[list[torch.Tensor], list[Range]]

_TICK = 1e-6
_EVERYTHING: Sequence[Range] = ((0.0, math.inf),)


@dataclass(frozen=True)
class AVData:
    """Clips, and where they start and end, in seconds. A kind that was not asked for is empty."""

    video_clips: list[torch.Tensor]
    video_timestamps: list[Range]
    audio_clips: list[torch.Tensor]
    audio_timestamps: list[Range]


class AVDecoder:
    """Decoder that opens its file again for each call, without threads of its own: it may be used
    in forked workers.
    """

    def __init__(self, stream: BinaryIO) -> None:
        import_module("av")
        self.stream = stream

    def get_video(self) -> AVData:
        return self.get_clips(video_clip_ranges=_EVERYTHING)

    def get_audio(self) -> AVData:
        return self.get_clips(audio_clip_ranges=_EVERYTHING)

    def get_video_with_audio(self) -> AVData:
        return self.get_clips(video_clip_ranges=_EVERYTHING, audio_clip_ranges=_EVERYTHING)

    def get_frames(self, video_decode_audio: bool = False) -> AVData:
        """Decodes all of the video, with its audio if asked to; of a file without video, the
        audio."""
        with self._open() as container:
            has_video, has_audio = bool(container.streams.video), bool(container.streams.audio)
        wants_audio = has_audio and (video_decode_audio or not has_video)
        return self.get_clips(
            _EVERYTHING if has_video else None, _EVERYTHING if wants_audio else None
        )

    def get_clips(
        self,
        video_clip_ranges: Sequence[Range] | None = None,
        audio_clip_ranges: Sequence[Range] | None = None,
        video_unit: str = "seconds",
        audio_unit: str = "seconds",
        video_out_frame_size: tuple[int, int] | None = None,
    ) -> AVData:
        """Decodes parts of both; of what has no ranges, nothing."""
        video: Clips = ([], [])
        audio: Clips = ([], [])
        if video_clip_ranges is not None:
            video = self.get_video_clips(video_clip_ranges, video_unit, video_out_frame_size)
        if audio_clip_ranges is not None:
            audio = self.get_audio_clips(audio_clip_ranges, audio_unit)
        return AVData(*video, *audio)

    def get_video_clips(
        self,
        video_clip_ranges: Sequence[Range],
        video_unit: str = "seconds",
        video_out_frame_size: tuple[int, int] | None = None,
    ) -> Clips:
        """Decodes the frames that are shown at any time from start to end, both included, or of
        these numbers.

        `video_unit`: "seconds" or "frames"; `video_out_frame_size`: (width, height).
        """
        clips, times = [], []
        for first, last in video_clip_ranges:
            with self._open() as container:
                stream = _first(container.streams.video, "video")
                per_second = _numbers_per_second(video_unit, "frames", float(stream.average_rate))
                # A number of a frame stands for the middle of the time in which it is shown.
                middle = 0.0 if video_unit == "seconds" else 0.5
                begin, end = (first + middle) / per_second, (last + middle) / per_second
                frames = list(_frames_shown(container, stream, begin, end))
                if not frames:
                    raise ValueError(f"no frame is shown from {begin:.3f} to {end:.3f} seconds")
                times.append((frames[0].time, frames[-1].time + _seconds(frames[-1], stream)))
                clips.append(
                    torch.from_numpy(
                        np.stack([_pixels(frame, video_out_frame_size) for frame in frames])
                    )
                )
        return clips, times

    def get_audio_clips(
        self, audio_clip_ranges: Sequence[Range], audio_unit: str = "seconds"
    ) -> Clips:
        """Decodes the samples from start to end, the end not included. `audio_unit`: "seconds" or
        "samples".
        """
        clips, times = [], []
        for first, last in audio_clip_ranges:
            with self._open() as container:
                stream = _first(container.streams.audio, "audio")
                rate = stream.rate
                per_second = _numbers_per_second(audio_unit, "samples", rate)
                begin, end = first / per_second, last / per_second
                frames = list(_frames_shown(container, stream, begin, end))
                if not frames:
                    raise ValueError(f"no sample is played from {begin:.3f} to {end:.3f} seconds")
                played = np.concatenate([_channels(frame) for frame in frames], axis=1)
                start = round(frames[0].time * rate)
                stop = min(start + played.shape[1], end * rate)
                cut = slice(max(round(begin * rate) - start, 0), round(stop) - start)
                clips.append(torch.from_numpy(played[:, cut].copy()))
                times.append((max(begin, start / rate), stop / rate))
        return clips, times

    def _open(self) -> Any:
        self.stream.seek(0)
        container = import_module("av").open(self.stream, "r")
        for stream in container.streams:
            # Threads of the decoder would not be there in a forked process.
            stream.thread_type = "NONE"
        return container


def _first(streams: Sequence[T], kind: str) -> T:
    if not streams:
        raise ValueError(f"the file has no {kind}")
    return streams[0]


def _numbers_per_second(unit: str, counted: str, rate: float) -> float:
    if unit not in ("seconds", counted):
        raise ValueError(f"unit must be seconds or {counted}, but is {shown(unit)}")
    return 1.0 if unit == "seconds" else rate


def _frames_shown(container: Any, stream: Any, begin: float, end: float) -> Iterator[Any]:
    """Yields the frames of a stream that are shown at any time from `begin` to `end`, both
    included."""
    if begin > 0:
        container.seek(int(begin / stream.time_base), stream=stream, backward=True)
    for frame in container.decode(stream):
        if frame.time > end + _TICK:
            return
        if frame.time + _seconds(frame, stream) > begin + _TICK:
            yield frame


def _seconds(frame: Any, stream: Any) -> float:
    if hasattr(frame, "samples"):
        return frame.samples / frame.sample_rate
    return (
        float(frame.duration * frame.time_base)
        if frame.duration
        else float(1 / stream.average_rate)
    )


def _pixels(frame: Any, size: tuple[int, int] | None) -> np.ndarray:
    width, height = size or (None, None)
    return frame.to_ndarray(format="rgb24", width=width, height=height).transpose(2, 0, 1)


def _channels(frame: Any) -> np.ndarray:
    """Returns [channels, samples], whether they are stored one after the other or taking turns."""
    samples = frame.to_ndarray()
    return samples if frame.format.is_planar else samples.reshape(-1, frame.layout.nb_channels).T
