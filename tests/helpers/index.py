"""A package index on this machine, with or without range requests."""

import re
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

OP_FILE = "vllm/attention/ops/prefix_prefill.py"


def write_wheel(
    folder: Path, version: str, text: str, filler: bytes = b"", op_file: str = OP_FILE
) -> Path:
    """Write a wheel of vLLM, or of the package of another op file, with that file, and one that is no op."""
    name = op_file.partition("/")[0]
    path = folder / f"{name}-{version}-cp38-abi3-manylinux1_x86_64.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(f"{name}/_C.abi3.so", filler)
        wheel.writestr(op_file, text)
        metadata = f"Name: {name}\nVersion: {version}\n"
        wheel.writestr(f"{name}-{version}.dist-info/METADATA", metadata)
    return path


class Index(ThreadingHTTPServer):
    """Serves the wheels of a folder; ``sent`` counts the bytes of wheels."""

    def __init__(self, folder: Path, ranges: bool) -> None:
        self.folder, self.ranges, self.sent = folder, ranges, 0
        super().__init__(("127.0.0.1", 0), _Handler)

    @property
    def url(self) -> str:
        """Return the address of the index, for pip."""
        return f"http://127.0.0.1:{self.server_address[1]}/simple"


class _Handler(BaseHTTPRequestHandler):
    server: Index

    def do_GET(self) -> None:
        name = self.path.rpartition("/")[2]
        if not name:
            links = "".join(
                f'<a href="/{p.name}">{p.name}</a>' for p in self.server.folder.iterdir()
            )
            self._answer(200, links.encode(), {"Content-Type": "text/html"})
            return
        data = (self.server.folder / name).read_bytes()
        asked = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range", ""))
        if asked is None or not self.server.ranges:
            self._answer(200, data, {})
        else:
            first = int(asked[1]) if asked[1] else max(0, len(data) - int(asked[2]))
            last = min(int(asked[2]), len(data) - 1) if asked[1] and asked[2] else len(data) - 1
            header = {"Content-Range": f"bytes {first}-{last}/{len(data)}"}
            self._answer(206, data[first : last + 1], header)

    def _answer(self, status: int, data: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.server.sent += len(data) if "Content-Type" not in headers else 0
        self.wfile.write(data)

    def log_message(self, *words: object) -> None:
        """Print nothing."""


@contextmanager
def serving(folder: Path, ranges: bool = True) -> Iterator[Index]:
    """Yield an index that serves the wheels of a folder."""
    with Index(folder, ranges) as index:
        threading.Thread(target=index.serve_forever, daemon=True).start()
        try:
            yield index
        finally:
            index.shutdown()
