"""pure. Images of http and https URLs, each fetched once into a folder.

The addresses come from data of strangers. So a server in a private network is asked only if its
host is allowed by name, also where a public server redirects to it, and what comes back is kept
only if it is an image.
"""

from __future__ import annotations

import hashlib
import http.client
import ipaddress
import os
import ssl
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

from megatron.packing.quoting import shown
from megatron.sft.images.source import ImageError, ImageSource, size_of

SECONDS = 30.0
"""Longest time of an attempt, from the connection to the last byte."""
MAX_BYTES = 64 << 20
_PAUSES = (1.0, 4.0)
"""Seconds before the second and the third attempt."""
_RETRIED = (408, 425, 429, 500, 502, 503, 504)
"""Statuses of servers that may answer later."""
_BLOCK = 1 << 16
_KEPT = "%/:=&?~#+!$,;'@()*[]"
"""Characters that a URL has as they are; others, such as spaces, are written as %20."""


@dataclass(frozen=True)
class ImageCache:
    """A folder of images by the digests of their URLs."""

    folder: str
    hosts: tuple[str, ...] = ()
    """Hosts that are asked although they are in a private network."""
    seconds: float = SECONDS
    max_bytes: int = MAX_BYTES

    def located(self, source: ImageSource) -> ImageSource:
        """Returns an image with its path, that of a URL in the folder, fetched if it is not there.

        Raises ImageError, named as the image is, for what cannot be fetched or is no image;
        OSError if the folder cannot be written.
        """
        if not source.url:
            return source
        digest = hashlib.sha256(source.url.encode(errors="surrogatepass")).hexdigest()
        path = Path(self.folder) / digest[:2] / digest
        if not path.is_file():
            content = self._fetched(source)
            size_of(source._replace(url="", content=content))
            path.parent.mkdir(parents=True, exist_ok=True)
            # Other processes see a whole file or none.
            with NamedTemporaryFile(dir=path.parent, delete=False) as file:
                file.write(content)
            os.replace(file.name, path)
        return source._replace(path=str(path))

    def _fetched(self, source: ImageSource) -> bytes:
        for pause in (*_PAUSES, None):
            try:
                return self._attempt(source.url)
            except _Refused as refusal:
                reason, may_pass = str(refusal), False
            except urllib.error.HTTPError as error:
                reason, may_pass = f"{error.code} {error.reason}", error.code in _RETRIED
                error.close()
            except (OSError, http.client.HTTPException, ValueError) as error:
                cause = getattr(error, "reason", None) or error
                reason = str(cause) or type(cause).__name__
                # A URL that is none, and a certificate that is not trusted, stay so.
                may_pass = not isinstance(cause, (ValueError, ssl.SSLCertVerificationError))
            if pause is None or not may_pass:
                break
            time.sleep(pause)
        raise ImageError(f"{source.name} cannot be fetched: {reason:.200}")

    def _attempt(self, url: str) -> bytes:
        end = time.monotonic() + self.seconds
        request = urllib.request.Request(
            urllib.parse.quote(url, safe=_KEPT), headers={"User-Agent": "megatron-sft"}
        )
        content = bytearray()
        with self._opener().open(request, timeout=self.seconds) as response:
            while block := response.read1(_BLOCK):
                content += block
                if len(content) > self.max_bytes:
                    raise _Refused(f"it has more than {self.max_bytes:,} bytes")
                if time.monotonic() > end:
                    raise TimeoutError(f"it takes more than {self.seconds:g} seconds")
            if response.length:  # bytes that were announced
                raise http.client.IncompleteRead(bytes(content[:0]), response.length)
        return bytes(content)

    def _opener(self) -> urllib.request.OpenerDirector:
        """Returns what opens http and https alone: redirections to files or ftp are errors."""
        opener = urllib.request.OpenerDirector()
        for handler in (
            urllib.request.ProxyHandler(),
            urllib.request.HTTPDefaultErrorHandler(),
            urllib.request.HTTPRedirectHandler(),
            urllib.request.HTTPErrorProcessor(),
            urllib.request.UnknownHandler(),
            _Http(self.hosts),
            _Https(self.hosts),
        ):
            opener.add_handler(handler)
        return opener


def url_cache(path: str | None, hosts: Sequence[str]) -> ImageCache | None:
    """Returns the folder of --image-url-cache with --image-url-hosts; None without it. Raises
    ValueError if it cannot be made.
    """
    if path is None:
        return None
    folder = Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--image-url-cache {folder} cannot be made: {error.strerror}") from None
    return ImageCache(str(folder.absolute()), tuple(map(str.lower, hosts)))


class _Refused(Exception):
    """An answer that is the same at each attempt."""


def _checked(kind: Callable[..., Any], hosts: tuple[str, ...]) -> Callable[..., Any]:
    """Returns a maker of connections that refuse servers in a private network.

    The address that is connected to is looked at, and not the one that a name had before.
    """

    def make_connection(*arguments: Any, **options: Any) -> Any:
        connection = kind(*arguments, **options)
        connect = connection.connect

        def connect_and_check() -> None:
            connect()
            text = connection.sock.getpeername()[0].partition("%")[0]
            address: Any = ipaddress.ip_address(text)
            address = getattr(address, "ipv4_mapped", None) or address
            if not address.is_global and connection.host.lower() not in hosts:
                raise _Refused(
                    f"{shown(connection.host)} is {address}, in a private network; if its images "
                    f"are meant, pass --image-url-hosts {connection.host}"
                )

        connection.connect = connect_and_check
        return connection

    return make_connection


class _Http(urllib.request.HTTPHandler):
    def __init__(self, hosts: tuple[str, ...]) -> None:
        super().__init__()
        self._hosts = hosts

    def http_open(self, req: urllib.request.Request) -> Any:
        # A proxy is often in a private network, and decides itself what it reaches.
        kind: Any = http.client.HTTPConnection
        return self.do_open(kind if req.has_proxy() else _checked(kind, self._hosts), req)


class _Https(urllib.request.HTTPSHandler):
    def __init__(self, hosts: tuple[str, ...]) -> None:
        super().__init__()
        self._hosts = hosts

    def https_open(self, req: urllib.request.Request) -> Any:
        kind: Any = http.client.HTTPSConnection
        has_proxy = req.has_proxy() or getattr(req, "_tunnel_host", None)
        return self.do_open(kind if has_proxy else _checked(kind, self._hosts), req)
