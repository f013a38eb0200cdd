"""Documents behind URLs: what a folder here gives, a store gives, with the same errors."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
from moto.server import ThreadedMotoServer

from rag_windows import DocumentError
from rag_windows_retrievers import Documents, load_documents

FILES = {
    "notes/a.md": b"# The Bridge\n\nIt stands.",
    "notes/b.jsonl": b'{"text": "One.", "id": "one"}\nnothing\n{"text": "Two.", "k": [1]}\n',
    "notes/deep/c.txt": "Zürich.\r\n東京.".encode("utf-8-sig"),
    "notes/deep/d.txt": b"One.\n\xff\xfe",
    "notes/deep/e.txt": b" \n",
    "notes/deep/f.png": b"\x89PNG",
    "notes/g.txt": b"\x00\x01",
    "notes/h.pdf": b"%PDF-1.4 but no more",
    "notes/.hidden/i.txt": b"Nobody asked for it.",
    "notes/.j.txt": b"Nor for this.",
    "notes/plain.rst": b"Read where it is named.",
}


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """The address of a stand-in for S3."""
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    yield "http://{}:{}".format(*server.get_host_and_port())
    server.stop()


@pytest.fixture(scope="module", params=["memory", "s3"])
def store(request: pytest.FixtureRequest) -> Iterator[str]:
    """The URL of a folder that holds the files."""
    with pytest.MonkeyPatch.context() as environment:
        if request.param == "s3":
            environment.setenv("AWS_ENDPOINT_URL", request.getfixturevalue("server"))
            for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION"):
                environment.setenv(name, "us-east-1")
        fsspec.get_filesystem_class(request.param).clear_instance_cache()
        system, path = fsspec.url_to_fs(f"{request.param}://shelf")
        system.mkdirs(path, exist_ok=True)
        system.pipe({f"{path}/{name}": data for name, data in FILES.items()})
        yield system.unstrip_protocol(path)
        system.rm(path, recursive=True)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, data in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(data)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def told(loaded: Documents, base: str = "") -> str:
    """What was loaded, with a store's files named as if they were here."""
    return repr(loaded).replace(f"{base}/" if base else "", "")


@pytest.mark.parametrize(
    "names",
    [
        ["notes"],
        ["notes/"],
        ["notes/deep", "notes/a.md", "notes/deep/c.txt"],
        ["notes/**/*.txt"],
        ["notes/d*p"],
        ["notes/plain.rst"],
        ["notes/b.jsonl", "notes/h.pdf"],
    ],
)
def test_a_store_gives_what_a_folder_here_gives(store: str, here: Path, names: list[str]) -> None:
    found = load_documents([f"{store}/{name}" for name in names], strict=False)
    expected = load_documents(names, strict=False)
    assert expected.documents
    assert told(found, store) == told(expected)
    assert all(one.metadata["source"].startswith(store) for one in found.documents)


@pytest.mark.parametrize("name", ["notes", "notes/deep/d.txt", "notes/g.txt", "notes/deep/e.txt"])
def test_errors_are_those_of_files(store: str, here: Path, name: str) -> None:
    with pytest.raises(DocumentError) as expected:
        load_documents([name])
    with pytest.raises(DocumentError) as found:
        load_documents([f"{store}/{name}"])
    assert str(found.value).replace(f"{store}/", "") == str(expected.value)


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("nowhere", "nowhere: no such file or folder. Check"),
        ("notes/*.zip", "matches nothing"),
        ("notes/a.md::zip://x", "URLs inside URLs"),
    ],
)
def test_what_is_not_there_is_named(store: str, name: str, error: str) -> None:
    with pytest.raises(DocumentError, match=error):
        load_documents([f"{store}/{name}"], strict=False)


def test_what_no_library_reads_is_named() -> None:
    with pytest.raises(DocumentError, match=r"^shelf://a: Protocol not known: shelf\. Check"):
        load_documents(["shelf://a"])


def test_files_that_go_away_or_fail_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    from fsspec.implementations.memory import MemoryFileSystem

    system = fsspec.filesystem("memory")
    for name in ("a", "b", "c", "d"):
        system.pipe_file(f"/failing/{name}.txt", name.encode())
    read = MemoryFileSystem.cat_file

    def cat_file(self: MemoryFileSystem, path: str, *given: object, **more: object) -> bytes:
        if path.endswith("b.txt"):
            raise FileNotFoundError(path)
        if path.endswith("c.txt"):
            raise KeyError("the client's own")
        data: bytes = read(self, path, *given, **more)
        return data

    monkeypatch.setattr(MemoryFileSystem, "cat_file", cat_file)
    loaded = load_documents(["memory://failing"], strict=False)
    assert [one.text for one in loaded.documents] == ["a", "d"]
    reasons = ["no such file or folder", '"the client\'s own"']
    assert [one.reason.strip("'") for one in loaded.skipped] == reasons
    with pytest.raises(DocumentError, match=r"failing/b.txt: no such file"):
        load_documents(["memory://failing"])


def test_options_reach_the_store(tmp_path: Path) -> None:
    (tmp_path / "a.zip").write_bytes(b"no archive")
    options = {"fo": str(tmp_path / "a.zip")}
    with pytest.raises(DocumentError, match=r"^zip://a\.md: File is not a zip file\. Check"):
        load_documents(["zip://a.md"], storage_options=options)


def test_without_fsspec_one_line_says_what_to_install() -> None:
    program = (
        "import sys; sys.modules['fsspec'] = None\n"
        "from rag_windows_retrievers import load_documents\n"
        "load_documents(['s3://shelf/notes'])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert "Reading documents by URL needs fsspec" in done.stderr.splitlines()[-1]
