"""Downloading public data sets from a local server."""

from __future__ import annotations

import errno
import gzip
import hashlib
import io
import lzma
import socket
import tarfile
import threading
import tomllib
import zipfile
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files as resources
from pathlib import Path

import pytest

from regard.data import download
from regard.data import fetch as module
from regard.data.corpora import names_of
from regard.data.fetch import Archive, PublicFile, PublicSet, fetch, set_of, sets
from regard.errors import UserError
from regard.recipes import load

TEXT = "".join(f"sentence number {i} of the text\n" for i in range(20_000)).encode()
GZIPPED = gzip.compress(TEXT, mtime=0)


def sha(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


class Server(ThreadingHTTPServer):
    """Serves `files`, by default with ranges; `cuts` lists after how many bytes to close a connection."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, bytes] = {}
        self.ranges = True
        self.etag = True
        self.cuts: list[int] = []
        self.asked: list[tuple[str, str | None]] = []
        self.served = 0

    @property
    def base(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        wanted = self.headers.get("Range")
        self.server.asked.append((self.path, wanted))
        content = self.server.files.get(self.path)
        if content is None:
            self.send_error(404)
            return
        etag = f'"{sha(content)[:8]}"'
        start = 0
        if wanted and self.server.ranges and self.headers.get("If-Range", etag) == etag:
            start = int(wanted.removeprefix("bytes=").removesuffix("-"))
            if start >= len(content):
                self.send_response(416)
                self.send_header("Content-Range", f"bytes */{len(content)}")
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        else:
            self.send_response(200)
        if self.server.etag:
            self.send_header("ETag", etag)
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        body = content[start:]
        if self.server.cuts:
            body = body[: self.server.cuts.pop(0)]
            self.close_connection = True
        self.server.served += len(body)  # before the body goes out: the client may be done the moment it has it
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(download, "PAUSE", 0.0)
    with Server() as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield running
        running.shutdown()
        thread.join()


def offer(monkeypatch: pytest.MonkeyPatch, *files: PublicFile, **archives: Archive) -> None:
    """Make `toy` the only public set."""
    toy = PublicSet("toy", "a toy", "none", 1_000_000, tuple(files), archives)
    monkeypatch.setattr(module, "sets", lambda: {"toy": toy})


def plain(content: bytes = TEXT) -> PublicFile:
    return PublicFile("train.en", "https://data.example/a/train.en", sha256=sha(content), text_sha256=sha(content))


def zipped() -> PublicFile:
    return PublicFile("train.en", "https://data.example/a/train.en.gz", text_sha256=sha(TEXT))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_file_is_downloaded_once(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    offer(monkeypatch, plain())
    server.files["/a/train.en"] = TEXT
    seen: list[tuple[str, int, int | None]] = []
    home = fetch("toy", tmp_path, base=server.base, progress=lambda *now: seen.append(now))
    assert home == tmp_path / "toy"
    assert (home / "train.en").read_bytes() == TEXT
    assert names(home) == ["train.en"]
    assert seen[-1] == ("train.en", len(TEXT), len(TEXT))
    assert [so_far for _, so_far, _ in seen] == sorted(so_far for _, so_far, _ in seen)
    fetch("toy", tmp_path, base=server.base)
    assert server.asked == [("/a/train.en", None)]


def test_gzip_is_decompressed_and_its_text_verified(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer(monkeypatch, zipped())
    server.files["/mirror/a/train.en.gz"] = GZIPPED
    home = fetch("toy", tmp_path, base=server.base + "/mirror/")
    assert (home / "train.en").read_bytes() == TEXT
    assert names(home) == ["train.en"]


@pytest.mark.parametrize("suffix", [".gz", ".xz"])
def test_a_compressed_copy_counts_as_present(
    suffix: str, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer(monkeypatch, zipped())
    (tmp_path / "toy").mkdir()
    (tmp_path / "toy" / f"train.en{suffix}").write_bytes(GZIPPED if suffix == ".gz" else lzma.compress(TEXT))
    fetch("toy", tmp_path, base=server.base)
    assert server.asked == []


def test_a_broken_connection_is_resumed_without_fetching_a_byte_twice(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer(monkeypatch, plain())
    server.files["/a/train.en"] = TEXT
    server.cuts = [100_000, 50_000]
    home = fetch("toy", tmp_path, base=server.base)
    assert (home / "train.en").read_bytes() == TEXT
    assert server.asked == [("/a/train.en", r) for r in (None, "bytes=100000-", "bytes=150000-")]
    assert server.served == len(TEXT)


def test_an_incomplete_download_is_kept_and_resumed_by_the_next_run(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer(monkeypatch, zipped())
    server.files["/a/train.en.gz"] = GZIPPED
    server.cuts = [1000, 0, 0, 0]
    with pytest.raises(UserError, match=r"broke 4 times.*1,000 bytes.*are kept.*to resume"):
        fetch("toy", tmp_path, base=server.base)
    part = tmp_path / "toy" / "train.en.gz.part"
    assert part.read_bytes() == GZIPPED[:1000]
    assert not (tmp_path / "toy" / "train.en").exists()
    fetch("toy", tmp_path, base=server.base)
    assert server.asked[-1] == ("/a/train.en.gz", "bytes=1000-")
    assert server.served == len(GZIPPED)
    assert names(tmp_path / "toy") == ["train.en"]


def test_without_ranges_a_download_starts_again(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer(monkeypatch, plain())
    server.files["/a/train.en"] = TEXT
    server.ranges, server.cuts = False, [100_000]
    assert (fetch("toy", tmp_path, base=server.base) / "train.en").read_bytes() == TEXT
    assert server.served == 100_000 + len(TEXT)


def test_a_file_that_changed_is_not_joined_to_its_old_part(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed = TEXT.upper()
    offer(monkeypatch, PublicFile("train.en", "https://data.example/a/train.en"))
    server.files["/a/train.en"] = TEXT
    server.cuts = [1000, 0, 0, 0]
    with pytest.raises(UserError):
        fetch("toy", tmp_path, base=server.base)
    server.files["/a/train.en"] = changed
    assert (fetch("toy", tmp_path, base=server.base) / "train.en").read_bytes() == changed


@pytest.mark.parametrize("start", [TEXT, TEXT + b"too much"])
def test_a_part_that_is_already_complete_or_too_long(
    start: bytes, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer(monkeypatch, plain())
    server.files["/a/train.en"] = TEXT
    (tmp_path / "toy").mkdir()
    (tmp_path / "toy" / "train.en.part").write_bytes(start)
    assert (fetch("toy", tmp_path, base=server.base) / "train.en").read_bytes() == TEXT
    assert server.served == (0 if start == TEXT else len(TEXT))


@pytest.mark.parametrize("file", [plain(), zipped()], ids=["plain", "gz"])
def test_contents_other_than_published_are_removed(
    file: PublicFile, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer(monkeypatch, file)
    server.files |= {"/a/train.en": b"something else\n", "/a/train.en.gz": gzip.compress(b"something else\n")}
    with pytest.raises(UserError, match=r"train.en (from 127.0.0.1:\d+|of toy) is not the published file.*removed"):
        fetch("toy", tmp_path, base=server.base)
    assert names(tmp_path / "toy") == []


def test_an_error_page_instead_of_an_archive(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    offer(monkeypatch, zipped())
    server.files["/a/train.en.gz"] = b"<html>please sign in</html>"
    with pytest.raises(UserError, match="cannot be unpacked"):
        fetch("toy", tmp_path, base=server.base)
    assert names(tmp_path / "toy") == []


def test_a_users_file_is_never_replaced(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    offer(monkeypatch, plain())
    (tmp_path / "toy").mkdir()
    (tmp_path / "toy" / "train.en").write_bytes(b"mine\n")
    with pytest.raises(UserError, match="move it away"):
        fetch("toy", tmp_path, base=server.base)
    assert (tmp_path / "toy" / "train.en").read_bytes() == b"mine\n"


def test_not_found_names_host_and_path(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    offer(monkeypatch, plain())
    with pytest.raises(UserError, match=r"127.0.0.1:\d+ has no /a/train.en \(404\).*--data DIR"):
        fetch("toy", tmp_path, base=server.base)


def test_without_network_the_error_names_the_host_and_an_alternative(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    offer(monkeypatch, plain())
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(UserError) as caught:
        fetch("toy", tmp_path, base=f"http://127.0.0.1:{port}")
    message = str(caught.value)
    assert f"127.0.0.1:{port}" in message and "--data DIR" in message and "\n" not in message


def test_unknown_names_and_odd_mirrors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"no public data set 'multi40k'; there are .*multi30k"):
        fetch("multi40k", tmp_path)
    offer(monkeypatch, plain())
    with pytest.raises(UserError, match="http"):
        fetch("toy", tmp_path, base="file:///etc")


def test_full_disks_and_missing_permissions_are_reported_in_one_line(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer(monkeypatch, plain())
    server.files["/a/train.en"] = TEXT
    for code, said in ((errno.ENOSPC, "no space left on the disk"), (errno.EACCES, "no permission to write")):

        def fail(*_: object, code: int = code) -> bool:
            raise OSError(code, "from the system", "somewhere")

        with monkeypatch.context() as patch, pytest.raises(UserError, match=said):
            patch.setattr(download, "_resume", fail)
            fetch("toy", tmp_path, base=server.base)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="in the way"):
        fetch("toy", tmp_path / "file", base=server.base)


# --- archives -----------------------------------------------------------------------------------------------------

TAGGED = b"""<doc docid="1">
<url>http://talks.example/1</url>
<keywords>talks, cats</keywords>
<speaker>Some One</speaker>
<talkid>1</talkid>
<title>On cats</title>
<description>TED Talk Subtitles: cats</description>
 This is one.
This is two.
<translator href="x">Someone Else</translator>
</doc>
"""
SEGMENTS = b'<mteval><doc><seg id="1"> One &amp; only. </seg>\n<seg id="2">Two.</seg></doc></mteval>\n'


def tar(**members: bytes) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return out.getvalue()


def zip_of(**members: bytes) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return out.getvalue()


@pytest.mark.parametrize(("make", "ending"), [(tar, ".tgz"), (zip_of, ".zip")])
def test_only_named_members_are_extracted_and_concatenated_in_order(
    make: Callable[..., bytes], ending: str, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer(
        monkeypatch,
        PublicFile("train.en", parts=(("talks", "en/train"), ("talks", "more"))),
        PublicFile("ted.en", parts=(("talks", "tagged"),), form="ted", except_every=2),
        PublicFile("val.en", parts=(("talks", "tagged"),), form="ted", every=2),
        PublicFile("test.en", parts=(("talks", "test.sgm"),), form="segments"),
        talks=Archive("https://data.example/talks" + ending),
    )
    members = {"en/train": b"a\nb", "more": b"c\r\n", "tagged": TAGGED, "test.sgm": SEGMENTS, "../../evil": b"x\n"}
    server.files["/talks" + ending] = make(**members)
    home = fetch("toy", tmp_path / "deep" / "er", base=server.base)
    assert {path.name: path.read_bytes() for path in home.iterdir()} == {
        "train.en": b"a\nb\nc\n",
        "ted.en": b"On cats\nThis is one.\n",
        "val.en": b"TED Talk Subtitles: cats\nThis is two.\n",
        "test.en": b"One &amp; only.\nTwo.\n",
    }
    assert not list(tmp_path.rglob("evil"))
    fetch("toy", tmp_path / "deep" / "er", base=server.base)
    assert len(server.asked) == 1


def test_links_in_an_archive_are_not_followed(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as archive:
        link = tarfile.TarInfo("train")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
    offer(monkeypatch, PublicFile("train.en", parts=(("a", "train"),)), a=Archive("https://data.example/a.tgz"))
    server.files["/a.tgz"] = out.getvalue()
    with pytest.raises(UserError, match="no longer contains train"):
        fetch("toy", tmp_path, base=server.base)
    assert "train.en" not in names(tmp_path / "toy")


def test_sides_of_different_length_are_refused(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    offer(
        monkeypatch,
        PublicFile("train.en", parts=(("a", "e"),)),
        PublicFile("train.de", parts=(("a", "d"),)),
        a=Archive("https://data.example/a.tgz"),
    )
    server.files["/a.tgz"] = tar(e=b"1\n2\n", d=b"1\n")
    for _ in range(2):  # and the second time too: nothing of the first was left to be taken for good
        with pytest.raises(UserError, match=r"train.de has 1 lines but train.en has 2"):
            fetch("toy", tmp_path, base=server.base)


# --- the table ----------------------------------------------------------------------------------------------------


def test_the_table_is_consistent() -> None:
    table = sets()
    assert {"multi30k", "iwslt14", "iwslt17-en-de", "iwslt17-en-fr", "wmt14-en-de", "tinyshakespeare"} <= set(table)
    for entry in table.values():
        assert entry.description and entry.terms and entry.size > 0
        assert len({file.name for file in entry.files}) == len(entry.files)
        for file in entry.files:
            assert (file.url is None) == bool(file.parts)
            assert "/" not in file.name
            assert all(archive in entry.archives and member for archive, member in file.parts)
            assert file.url is None or (file.url.startswith("https://") and len(file.text_sha256 or "") == 64)
        for archive in entry.archives.values():
            assert archive.url.startswith("https://") and archive.verified == (archive.sha256 is not None)


@pytest.mark.parametrize("recipe", [recipe for entry in sets().values() for recipe in entry.recipes])
def test_a_set_has_the_files_of_the_recipes_that_it_names(recipe: str) -> None:
    known = set_of(recipe)
    assert known is not None
    present = {file.name for file in known.files}
    data = load(recipe).data
    for name in [*names_of(data), *(data.valid or []), *(data.test or [])]:
        assert {name, f"{name}.gz"} & present, (name, present)


def test_multi30k_has_the_published_names() -> None:
    raw = {f"{split}.{side}" for split in ("train", "val", "test_2016_flickr") for side in ("en", "de", "fr", "cs")}
    tokenised = {f"test_2016_flickr.lc.norm.tok.{side}" for side in ("en", "de")}
    assert {file.name for file in sets()["multi30k"].files} == raw | tokenised


@pytest.mark.parametrize(
    ("recipe", "name"),
    [("multi30k-en-de", "multi30k"), ("iwslt14-de-en", "iwslt14"), ("wmt14-en-de-base", "wmt14-en-de")],
)
def test_fetched_files_have_the_names_in_the_recipe(recipe: str, name: str) -> None:
    data = tomllib.loads((resources("regard.recipes") / f"{recipe}.toml").read_text(encoding="utf-8"))["data"]
    assert {data["source"], data["target"], *data["valid"], *data["test"]} <= {file.name for file in sets()[name].files}


def test_an_archive_without_a_checksum_must_equal_the_first_download(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer(monkeypatch, PublicFile("a.en", parts=(("talks", "a"),)), talks=Archive("https://data.example/talks.tgz"))
    first = server.files["/talks.tgz"] = tar(a=b"one\n")
    home = fetch("toy", tmp_path, base=server.base)
    assert (tmp_path / "SHA256SUMS").read_text() == f"{sha(first)}  toy/talks.tgz\n"
    (home / "a.en").unlink()
    fetch("toy", tmp_path, base=server.base)
    (home / "a.en").unlink()
    server.files["/talks.tgz"] = tar(a=b"other\n")
    with pytest.raises(UserError, match=r"talks\.tgz .* differs from the first download.* remove its line"):
        fetch("toy", tmp_path, base=server.base)
    assert names(home) == []
    (tmp_path / "SHA256SUMS").unlink()
    fetch("toy", tmp_path, base=server.base)
    assert (home / "a.en").read_bytes() == b"other\n"


@pytest.mark.parametrize("announced", [True, False])
def test_a_download_larger_than_its_set_is_refused(
    announced: bool, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer(monkeypatch, plain())
    server.files["/a/train.en"] = bytes(3_000_000)
    if not announced:
        monkeypatch.setattr(Handler, "send_header", _without_length)
    with pytest.raises(UserError, match=r"sends more than the expected maximum of 2,000,000 bytes for train\.en"):
        fetch("toy", tmp_path, base=server.base)
    assert names(tmp_path / "toy") == []


def _without_length(handler: Handler, name: str, value: str) -> None:
    if name != "Content-Length":
        BaseHTTPRequestHandler.send_header(handler, name, value)


def test_a_decompression_bomb_is_refused(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_EXPANSION", 2)
    offer(monkeypatch, PublicFile("train.en", "https://data.example/a/train.en.gz"))
    server.files["/a/train.en.gz"] = gzip.compress(bytes(5_000_000))
    with pytest.raises(UserError, match="unpacks to more than 4,000,000 bytes"):
        fetch("toy", tmp_path, base=server.base)
    offer(monkeypatch, PublicFile("a.en", parts=(("talks", "a"),)), talks=Archive("https://data.example/talks.tgz"))
    server.files["/talks.tgz"] = tar(a=bytes(5_000_000))
    with pytest.raises(UserError, match="unpacks to more than 4,000,000 bytes"):
        fetch("toy", tmp_path, base=server.base)
    assert not list((tmp_path / "toy").glob("*.member")) and not (tmp_path / "SHA256SUMS").exists()
