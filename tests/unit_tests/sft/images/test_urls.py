"""Images of URLs, from a server on this machine."""

import http.server
import io
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron.sft.images import urls
from megatron.sft.images.source import ImageError, ImageSize, ImageSource, size_of, source_of_text
from megatron.sft.images.urls import ImageCache, url_cache

Image = pytest.importorskip("PIL.Image")
HOST = "127.0.0.1"


def picture() -> bytes:
    content = io.BytesIO()
    Image.new("RGB", (9, 7)).save(content, "png")
    return content.getvalue()


class Server(http.server.ThreadingHTTPServer):
    """Answers by the path, and notes what it was asked for."""

    def __init__(self) -> None:
        super().__init__((HOST, 0), Answers)
        self.asked: list[str] = []

    def handle_error(self, *_: object) -> None:
        """Says nothing of clients that hang up."""

    def cached(self, folder: Path, **options: Any) -> ImageCache:
        return ImageCache(str(folder), (HOST,), **options)

    def image(self, path: str) -> ImageSource:
        return source_of_text(f"http://{HOST}:{self.server_address[1]}/{path}", "images[0]")


class Answers(http.server.BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        content, kind = picture(), self.path.strip("/").split("?")[0]
        status, headers = 200, {"Content-Length": str(len(content))}
        if kind.startswith("to-"):
            places = {
                "to-itself": self.path,
                "to-a-file": "file:///etc/hostname",
                "to-ftp": f"ftp://{HOST}/a.png",
                "to-localhost": f"http://localhost:{self.server.server_address[1]}/a.png",
                "to-an-image": "/a.png",
            }
            status, headers = 302, {"Location": places[kind], "Content-Length": "0"}
            content = b""
        elif kind == "busy" and self.server.asked.count(self.path) < 3:
            status, headers, content = 503, {"Content-Length": "0"}, b""
        elif kind == "missing":
            status, headers, content = 404, {"Content-Length": "0"}, b""
        elif kind == "text":
            content, headers = b"<html>", {}
        elif kind == "half":
            content = content[:30]
        elif kind == "large":
            content, headers = content + bytes(5000), {}
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if kind == "slow":
            for byte in range(20):
                self.wfile.write(content[byte : byte + 1])
                self.wfile.flush()
                time.sleep(0.02)
        else:
            self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Says nothing."""


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(urls, "_PAUSES", (0.0, 0.0))
    for name in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with Server() as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield running
        running.shutdown()
        thread.join()


def test_an_image_is_fetched_once(server: Server, tmp_path: Path) -> None:
    """Each epoch, and each rank of a machine, would ask the server again."""
    cache = server.cached(tmp_path)
    for _ in range(2):
        found = cache.located(server.image("to-an-image"))
        assert size_of(found) == ImageSize(7, 9)
    assert server.asked == ["/to-an-image", "/a.png"]
    cache.located(server.image("a b.png?é"))
    assert server.asked[2:] == ["/a%20b.png?%C3%A9"]
    assert len([path for path in tmp_path.rglob("*") if path.is_file()]) == 2


def test_a_busy_server_is_asked_again(server: Server, tmp_path: Path) -> None:
    server.cached(tmp_path).located(server.image("busy"))
    assert server.asked == ["/busy"] * 3


@pytest.mark.parametrize(
    ("path", "fault", "asked"),
    [
        ("missing", "cannot be fetched: 404 Not Found", 1),
        ("text", "cannot be read: it is no image that Pillow knows", 1),
        ("half", "cannot be fetched: IncompleteRead", 3),
        ("large", "cannot be fetched: it has more than 4,000 bytes", 1),
        ("slow", "cannot be fetched: .*(takes more than 0.1 seconds|timed out)", 3),
        ("to-itself", "cannot be fetched: 302 .*infinite loop", 11),
        ("to-a-file", "cannot be fetched: 302 .*not allowed", 1),
        ("to-ftp", "cannot be fetched: unknown url type: ftp", 3),
        ("to-localhost", "'localhost' is 127.0.0.1, in a private network; .*-hosts localhost", 1),
    ],
)
def test_what_is_no_image_is_named(
    server: Server, tmp_path: Path, path: str, fault: str, asked: int
) -> None:
    """A page of errors that is kept as an image fails in each later run."""
    cache = server.cached(tmp_path, seconds=0.1, max_bytes=4000)
    with pytest.raises(ImageError, match=rf"^images\[0\] 'http.*{fault}"):
        cache.located(server.image(path))
    assert len(server.asked) <= asked
    assert not [found for found in tmp_path.rglob("*") if found.is_file()]


def test_servers_in_private_networks_are_not_asked(server: Server, tmp_path: Path) -> None:
    """Data of strangers could reach what only this machine may."""
    with pytest.raises(ImageError, match=r"in a private network; .* pass --image-url-hosts 127"):
        ImageCache(str(tmp_path)).located(server.image("a.png"))
    assert not server.asked
    nothing = source_of_text("http://", "images[0]")
    with pytest.raises(ImageError, match="cannot be fetched: no host given"):
        ImageCache(str(tmp_path)).located(nothing)


def test_the_option(tmp_path: Path) -> None:
    made = url_cache(str(tmp_path / "a"), ("In.Tern",))
    assert made == ImageCache(str(tmp_path / "a"), ("in.tern",))
    assert url_cache(None, ()) is None
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=re.escape("--image-url-cache") + ".* cannot be made"):
        url_cache(str(tmp_path / "file" / "b"), ())
