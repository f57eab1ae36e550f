"""Preparation of a user's own documents: every kind of input, kills, workers, shards, splits, and bad input."""

import gzip
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from msa_pretrain.data import documents as documents_module
from msa_pretrain.data import prepare as prepare_module
from msa_pretrain.data import workers
from msa_pretrain.data.documents import find_units
from msa_pretrain.data.indexed import FILES, bin_path, open_indexed_dataset, read_manifest
from msa_pretrain.data.prepare import Recipe, prepare
from msa_pretrain.data.tokenizer import ByteTokenizer
from msa_pretrain.scripts import prepare_data

datasets = pytest.importorskip("datasets")
TEXTS = [f"document {number}: " + "naïve € 𝄞 " * (number % 7) for number in range(40)]
TEXTS[5], TEXTS[11] = "", "2024-01-01"  # an empty one, and one that a guessed schema would take for a date


def json_lines(path: Path, texts, **extra) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"text": text, **extra}) + "\n" for text in texts))
    return str(path)


def texts_at(prefix: Path) -> list[str]:
    dataset, _ = open_indexed_dataset(prefix)
    return [ByteTokenizer().decode(dataset[number]) for number in range(len(dataset))]


def recipe(*inputs, **changes) -> Recipe:
    return Recipe(**{"inputs": [str(item) for item in inputs], "tokenizer": "byte", **changes})


@pytest.fixture
def small_batches(monkeypatch):
    """Batches of about 200 characters, and a commit after each."""
    monkeypatch.setattr(documents_module, "BATCH_CHARACTERS", 200)
    monkeypatch.setattr(prepare_module, "_COMMIT_EVERY_S", 0.0)


def write_kind(folder: Path, kind: str) -> Path:
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = folder / f"data.{kind}"
    table = pa.table({"id": list(range(len(TEXTS))), "text": TEXTS})
    lines = Path(json_lines(folder / "lines", TEXTS)).read_bytes()
    (folder / "lines").unlink()
    if kind == "parquet":
        pq.write_table(table, path, row_group_size=7)
    elif kind == "arrow":
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table, max_chunksize=9)
    elif kind.endswith(".gz"):
        path.write_bytes(gzip.compress(lines))
    elif kind.endswith(".zst"):
        path.write_bytes(pytest.importorskip("zstandard").compress(lines))
    else:
        path.write_bytes(lines)
    return path


@pytest.mark.parametrize("kind", ["jsonl", "json", "jsonl.gz", "jsonl.zst", "parquet", "arrow"])
def test_every_kind_of_file(tmp_path, kind, small_batches):
    path = write_kind(tmp_path, kind)
    manifest, reused = prepare(recipe(path), tmp_path / "out")["train"]
    assert texts_at(tmp_path / "out" / "train") == [text for text in TEXTS if text]
    assert (manifest.num_documents, manifest.num_empty_documents, reused) == (39, 1, False)
    (source,) = manifest.sources
    assert (source.name, source.num_bytes, source.num_documents) == (str(path), path.stat().st_size, 40)
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["train.bin", "train.crc", "train.idx", "train.json"]
    written = {p: p.stat().st_mtime_ns for p in (tmp_path / "out").iterdir()}
    assert prepare(recipe(path), tmp_path / "out")["train"] == (manifest, True)
    assert written == {p: p.stat().st_mtime_ns for p in (tmp_path / "out").iterdir()}


def test_the_hash_of_a_source_is_that_of_its_texts(tmp_path):
    hashes = set()
    for kind in ("jsonl", "jsonl.gz", "parquet"):
        (tmp_path / kind).mkdir()
        manifest, _ = prepare(recipe(write_kind(tmp_path / kind, kind)), tmp_path / kind / "out")["train"]
        hashes.add(manifest.sources[0].sha256)
    assert len(hashes) == 1


@pytest.mark.parametrize(
    "unit, expected",
    [
        ("document", ["one\ntwo\n\nthree\n", "four"]),
        ("line", ["one", "two", "three", "four"]),
        ("paragraph", ["one\ntwo", "three\n", "four"]),
    ],
)
def test_text_files(tmp_path, unit, expected):
    (tmp_path / "a.txt").write_text("one\ntwo\n\nthree\n")
    (tmp_path / "b.txt").write_text("four")
    manifest, _ = prepare(recipe(tmp_path, text_unit=unit), tmp_path / "out")["train"]
    assert texts_at(tmp_path / "out" / "train") == expected
    assert manifest.num_empty_documents == (1 if unit == "line" else 0)


def test_folders_patterns_and_their_order(tmp_path):
    for name in ("b/2.jsonl", "b/1.jsonl", "a/x.jsonl", "c/9.jsonl"):
        json_lines(tmp_path / name, [name])
    (tmp_path / "b" / "notes.csv").write_text("no data")
    inputs = [tmp_path / "c/9.jsonl", tmp_path / "b", tmp_path / "a*" / "*.jsonl"]
    prepare(recipe(*inputs), tmp_path / "out")
    assert texts_at(tmp_path / "out" / "train") == ["c/9.jsonl", "b/1.jsonl", "b/2.jsonl", "a/x.jsonl"]
    with pytest.raises(ValueError, match=r"names .*/b/1\.jsonl twice"):
        find_units([str(tmp_path / "b"), str(tmp_path / "b" / "1.jsonl")])


def test_a_dataset_by_its_hub_name(tmp_path):
    """A local folder stands for the hub: load_dataset takes either."""
    json_lines(tmp_path / "hub" / "train-0.jsonl", TEXTS[:20])
    json_lines(tmp_path / "hub" / "train-1.jsonl", TEXTS[20:])
    json_lines(tmp_path / "hub" / "test.jsonl", ["a test"])
    prepare(recipe(f"hub:{tmp_path / 'hub'}"), tmp_path / "out")
    assert texts_at(tmp_path / "out" / "train") == [text for text in TEXTS if text]
    prepare(recipe(f"hub:{tmp_path / 'hub'}", split="test"), tmp_path / "test")
    assert texts_at(tmp_path / "test" / "train") == ["a test"]


def test_a_hub_name_without_a_network(monkeypatch):
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match=r"--input hub:no/such: split 'train' cannot be loaded .*and the network"):
        find_units(["hub:no/such"])


def test_unlike_metadata_and_blank_lines(tmp_path):
    path = tmp_path / "a.jsonl"
    lines = [{"text": "a", "meta": {"x": 1}}, {"meta": ["y"], "text": "b"}, {"text": None}, {"text": "c", "meta": "z"}]
    path.write_text("\n\n".join(json.dumps(line) for line in lines))
    manifest, _ = prepare(recipe(path), tmp_path / "out")["train"]
    assert texts_at(tmp_path / "out" / "train") == ["a", "b", "c"] and manifest.num_empty_documents == 1


def test_lone_surrogates_are_replaced_and_counted(tmp_path, capsys):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a\\ud83dz"}\n{"text": "\\ud83d\\ude00"}\n')
    prepare_data.main(["--input", str(path), "--tokenizer", "byte", "--output", str(tmp_path / "out")])
    assert texts_at(tmp_path / "out" / "train") == ["a\ufffdz", "😀"]
    assert "2 documents (0 empty ones skipped, 1 repaired)" in capsys.readouterr().out


@pytest.mark.parametrize(
    "content, expected",
    [
        ('{"text": "a"}\n{"text": "b"\n', r"a\.jsonl, line 2 is not a JSON object"),
        (
            '{"text": "a"}\n\n{"body": "b", "id": 1}\n',
            r"line 3 has no 'text', only \['body', 'id'\]\. Name the key: --t",
        ),
        ('["text"]\n', r"line 1 has no 'text', only list"),
        ('{"text": 3}\n', r"line 1: 'text' is of type int, not text"),
    ],
)
def test_bad_lines_are_named(tmp_path, content, expected):
    (tmp_path / "a.jsonl").write_text(content)
    with pytest.raises(ValueError, match=expected):
        prepare(recipe(tmp_path / "a.jsonl"), tmp_path / "out")


def test_files_that_cannot_be_read_are_named(tmp_path):
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(b'{"text": "abc"}\n' * 9999)[:-60])
    (tmp_path / "latin.jsonl").write_bytes('{"text": "é"}\n'.encode("latin-1"))
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 no parquet")
    for name in ("cut.jsonl.gz", "latin.jsonl", "bad.parquet"):
        with pytest.raises(ValueError, match=rf"{name} cannot be read: \S+"):
            prepare(recipe(tmp_path / name), tmp_path / "out", overwrite=True)


def test_columns_that_hold_no_text(tmp_path):
    path = write_kind(tmp_path, "parquet")
    with pytest.raises(ValueError, match=r"there is no column 'body', only \['id', 'text'\]\. Name it with --text-col"):
        prepare(recipe(path, text_column="body"), tmp_path / "out")
    with pytest.raises(ValueError, match=r"column 'id' is of type int64, not text"):
        prepare(recipe(path, text_column="id"), tmp_path / "out", overwrite=True)


def test_bad_arguments(tmp_path):
    path = json_lines(tmp_path / "a.jsonl", ["a", "b"])
    (tmp_path / "a.txt").write_text("x")
    (tmp_path / "a.csv").write_text("x")
    (tmp_path / "splits" / "train").mkdir(parents=True)
    (tmp_path / "splits" / "dataset_dict.json").write_text("{}")
    for inputs, changes, expected in (
        ([tmp_path / "absent.jsonl"], {}, r"there is no such file, and no data file below or matching it"),
        (["owner/name"], {}, r"A dataset on the hub is written hub:owner/name"),
        ([tmp_path / "a.csv"], {}, r"a\.csv is of no known kind\. Known are \.jsonl"),
        ([tmp_path / "splits"], {}, r"holds several splits \(train\)\. Name the folder of one"),
        ([tmp_path / "a.txt"], {}, r"--text-unit .*\. It is None"),
        ([path], {"text_unit": "line"}, r"--text-unit .*\. It is line"),
        ([path], {"shard": (2, 2)}, r"--shard 2/2: the number must lie in 0\.\.1"),
        ([path], {"shard": (0, 2)}, r"--shard 0/2: there are only 1 files to share"),
        ([path], {"held_out": {"valid": 1.5}}, r"--held-out .*a name and a share between 0 and 1"),
        ([path], {"held_out": {"train": 0.5}}, r"--held-out .* must leave something"),
        ([path], {"held_out": {"valid": 1e-9}}, r"no document fell into split valid: its share of 1e-09 is too small"),
    ):
        with pytest.raises(ValueError, match=expected):
            prepare(recipe(*inputs, **changes), tmp_path / "out", overwrite=True)
    with pytest.raises(ValueError, match=r"--num-workers \(0\) must be at least 1"):
        prepare(recipe(path), tmp_path / "out", num_workers=0)
    for arguments, expected in (
        (["--input", path, "--output", "x"], "--input needs --tokenizer"),
        (["--input", path, "--tokenizer", "byte"], "--output is missing"),
        (["--by-length", "8"], "--by-length needs --prefix"),
    ):
        with pytest.raises(SystemExit, match=expected):
            prepare_data.main(arguments)


def test_without_datasets_the_remedy_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=r"needs datasets, which is not there .* pip install 'msa-pretrain\[data\]'"):
        prepare(recipe(json_lines(tmp_path / "a.jsonl", ["a"])), tmp_path / "out")


def test_held_out_documents_are_chosen_by_their_text(tmp_path):
    texts = [f"text {number}" for number in range(2000)]
    first, second = json_lines(tmp_path / "a.jsonl", texts), json_lines(tmp_path / "b.jsonl", texts[::-1] + texts[:50])
    splits = {}
    for name in (first, second):
        done = prepare(recipe(name, held_out={"valid": 0.1, "test": 0.05}), Path(f"{name}.out"))
        splits[name] = {split: texts_at(Path(f"{name}.out") / split) for split in done}
    assert {split: set(found) for split, found in splits[first].items()} == {
        split: set(found) for split, found in splits[second].items()
    }
    sizes = {split: len(found) for split, found in splits[first].items()}
    assert sum(sizes.values()) == 2000 and 150 < sizes["valid"] < 250 and 60 < sizes["test"] < 140


def files_of(folder: Path, split: str = "train") -> dict[str, bytes]:
    return {path.__name__: path(folder / split).read_bytes() for path in FILES}


class Killed(BaseException):
    """Stands for a kill: nothing may catch it."""


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_preparation_goes_on_after_kills(tmp_path, monkeypatch, small_batches, kind):
    inputs = [write_kind(tmp_path, kind), json_lines(tmp_path / "second.jsonl", TEXTS)]
    wanted = recipe(*inputs, held_out={"valid": 0.2})
    prepare(wanted, tmp_path / "whole")
    original = prepare_module._Job._write
    for number, lives in enumerate((2, 3, 5, 9)):  # one batch may be the empty end of a unit
        output = tmp_path / f"killed{number}"
        for _ in range(40):
            left = [lives]

            def write(self, result, left=left):
                if not left[0]:
                    raise Killed
                left[0] -= 1
                original(self, result)

            monkeypatch.setattr(prepare_module._Job, "_write", write)
            try:
                prepare(wanted, output)
                break
            except Killed:
                assert not list(output.glob("train.*"))
        else:
            raise AssertionError("it makes no progress")
        for split in ("train", "valid"):
            assert files_of(output, split) == files_of(tmp_path / "whole", split)


@pytest.mark.parametrize("survivors", range(9))
def test_a_kill_between_the_renames(tmp_path, monkeypatch, small_batches, survivors):
    """Two splits of four files: each rename is the last thing that happens, in turn."""
    wanted = recipe(json_lines(tmp_path / "a.jsonl", TEXTS), held_out={"valid": 0.3})
    prepare(wanted, tmp_path / "whole")
    replace, count = os.replace, [0]

    def dying(source, target):
        if "unfinished" in str(source):
            count[0] += 1
            if count[0] > survivors:
                raise Killed
        replace(source, target)

    monkeypatch.setattr(os, "replace", dying)
    if survivors < 8:
        with pytest.raises(Killed):
            prepare(wanted, tmp_path / "out")
        # what a dying process does not do
        monkeypatch.setattr(os, "replace", replace)
        prepare(wanted, tmp_path / "out")
    else:
        prepare(wanted, tmp_path / "out")
    for split in ("train", "valid"):
        assert files_of(tmp_path / "out", split) == files_of(tmp_path / "whole", split)


def test_a_real_kill_of_a_job_with_workers(tmp_path):
    """SIGKILL in the middle, the files cut short behind the last commit; then two workers finish it."""
    path = json_lines(tmp_path / "a.jsonl", (f"{number} " + "x" * 3000 for number in range(4000)))
    code = "import sys; from msa_pretrain.data import prepare; prepare._COMMIT_EVERY_S = 0.05; "
    code += "from msa_pretrain.scripts.prepare_data import main; main(sys.argv[1:])"
    command = [sys.executable, "-c", code]
    arguments = ["--input", path, "--tokenizer", "byte", "--num-workers", "2", "--output", str(tmp_path / "out")]
    job = subprocess.Popen([*command, *arguments], stdout=subprocess.PIPE, text=True, start_new_session=True)
    state = tmp_path / "out" / ".prepare.json"
    deadline = time.monotonic() + 60
    while not (state.is_file() and json.loads(state.read_text())["documents"].get("train")):
        assert job.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    os.killpg(job.pid, signal.SIGKILL)
    job.wait()
    committed = json.loads(state.read_text())["documents"]["train"]
    assert 0 < committed < 4000
    prepare_data.main(arguments)
    prepare(recipe(path), tmp_path / "whole")
    assert files_of(tmp_path / "out") == files_of(tmp_path / "whole")


def test_what_may_not_be_continued(tmp_path, monkeypatch, small_batches):
    path = json_lines(tmp_path / "a.jsonl", TEXTS)
    monkeypatch.setattr(prepare_module._Job, "_finish", lambda self: (_ for _ in ()).throw(Killed()))
    with pytest.raises(Killed):
        prepare(recipe(path), tmp_path / "out")
    monkeypatch.undo()
    with pytest.raises(ValueError, match=r"holds an unfinished preparation of something else .* pass --overwrite"):
        prepare(recipe(path, held_out={"valid": 0.5}), tmp_path / "out")
    unfinished = tmp_path / "out" / ".train.unfinished.bin"
    os.truncate(unfinished, 50)
    with pytest.raises(ValueError, match=r"hold 39 documents and 50 bytes, fewer than the 39 documents"):
        prepare(recipe(path), tmp_path / "out")
    prepare(recipe(path), tmp_path / "out", overwrite=True)
    json_lines(Path(path), [*TEXTS, "more"])
    with pytest.raises(ValueError, match=r"out/train already holds data of another source"):
        prepare(recipe(path), tmp_path / "out")


def test_two_jobs_do_not_write_to_one_folder(tmp_path):
    path = json_lines(tmp_path / "a.jsonl", TEXTS)
    (tmp_path / "out").mkdir()
    alone = prepare_module._only_one(tmp_path / "out" / ".prepare.lock")
    with alone, pytest.raises(ValueError, match=r"another preparation is writing to .*/out"):
        prepare(recipe(path), tmp_path / "out")


def test_a_worker_that_dies_is_reported(tmp_path, monkeypatch):
    class Broken:
        def submit(self, *_):
            raise workers.BrokenProcessPool

        def shutdown(self, **_): ...

        def __enter__(self):
            return self

        def __exit__(self, *_): ...

    monkeypatch.setattr(workers, "ProcessPoolExecutor", lambda *_: Broken())
    with pytest.raises(ValueError, match=r"a worker process died, .* Run the same command again"):
        prepare(recipe(json_lines(tmp_path / "a.jsonl", TEXTS)), tmp_path / "out", num_workers=2)


def test_shards_merge_into_what_one_job_writes(tmp_path, capsys):
    inputs = [json_lines(tmp_path / f"{number}.jsonl", TEXTS[number::4]) for number in range(4)]
    for number in range(2):
        common = ["--tokenizer", "byte", "--output", str(tmp_path / "out"), "--shard", f"{number}/2"]
        prepare_data.main(["--input", *inputs, *common])
    shards = sorted((tmp_path / "out").glob("train-*.json"))
    assert [shard.name for shard in shards] == ["train-00000-of-00002.json", "train-00001-of-00002.json"]
    prepare_data.main(["--merge", *map(str, shards), "--output", str(tmp_path / "merged")])
    prepare(recipe(*inputs[::2], *inputs[1::2]), tmp_path / "whole")
    assert bin_path(tmp_path / "merged").read_bytes() == bin_path(tmp_path / "whole" / "train").read_bytes()
    merged, whole = read_manifest(tmp_path / "merged"), read_manifest(tmp_path / "whole" / "train")
    assert merged.fingerprint == whole.fingerprint and merged.sources == whole.sources
    assert merged.num_empty_documents == 1
    prepare_data.main(["--verify", str(tmp_path / "merged"), str(shards[0])])
    assert capsys.readouterr().out.count("verified") == 2
    with pytest.raises(SystemExit, match="merged holds data already"):
        prepare_data.main(["--merge", *map(str, shards), "--output", str(tmp_path / "merged")])


def test_tokenizers_are_not_mixed(tmp_path, write):
    prepare(recipe(json_lines(tmp_path / "a.jsonl", TEXTS)), tmp_path / "out")
    other = write("b", [[1, 2, 3]], vocab_size=257)
    with pytest.raises(SystemExit, match=r"one tokenizer must have made all data, but .*'byte'.* and \('t'"):
        prepare_data.main(["--merge", str(tmp_path / "out" / "train"), other, "--output", str(tmp_path / "merged")])
    assert not list(tmp_path.glob("*merg*"))


def test_documents_by_length(tmp_path, capsys):
    texts = ["x" * size for size in (3, 7, 8, 19, 20, 100)]
    prepare(recipe(json_lines(tmp_path / "a.jsonl", texts)), tmp_path)
    prepare_data.main(["--by-length", "8", "20", "--prefix", str(tmp_path / "train")])
    lengths = {
        p.stem: open_indexed_dataset(p.with_suffix(""))[0].lengths.tolist() for p in tmp_path.glob("train-*.json")
    }
    assert lengths == {"train-below-8": [4], "train-8-to-19": [8, 9], "train-from-20": [20, 21, 101]}
    for edges in (["20", "8"], ["1"]):
        with pytest.raises(SystemExit, match="give growing lengths in tokens"):
            prepare_data.main(["--by-length", *edges, "--prefix", str(tmp_path / "train")])


def test_progress_tells_rates_and_the_time_left(tmp_path, small_batches):
    seen = []
    path = json_lines(tmp_path / "a.jsonl", TEXTS)
    prepare(recipe(path), tmp_path / "out", on_progress=seen.append)
    assert [p.num_documents for p in seen] == sorted(p.num_documents for p in seen) and seen[-1].num_documents == 39
    assert all(p.documents_per_s > 0 and p.tokens_per_s > 0 for p in seen)
    assert seen[0].seconds_left > 0 and seen[-1].seconds_left < 0.1 * seen[0].seconds_left + 0.01
