from pathlib import Path

import pytest

from msa_pretrain.data import corpus
from msa_pretrain.data.corpus import list_corpus, read_corpus, stdlib_root


def names(split, **kwargs):
    return [name for name, _ in read_corpus(split, **kwargs)]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A library of 400 files of 10 bytes, and files that do not belong to the corpus."""
    root = tmp_path / "lib"
    for number in range(400):
        path = root / f"package{number % 7}" / f"module{number}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"%09d\n" % number)
    for folder in ("site-packages", "test", "package1/tests", "lib2to3/tests", "idlelib/idle_test", "__pycache__"):
        (root / folder).mkdir(parents=True)
        (root / folder / "module.py").write_text("excluded")
    (root / "_sysconfigdata__linux.py").write_text("excluded")
    (root / "notes.txt").write_text("excluded")
    return root


def test_the_standard_library_is_split_by_file():
    train, valid = names("train"), names("valid")
    assert not set(train) & set(valid)
    assert sorted(train + valid) == [file.name for file in list_corpus()]
    assert train == sorted(train) and valid == sorted(valid)
    assert 0.02 < len(valid) / (len(train) + len(valid)) < 0.10
    assert "argparse.py" in train + valid
    folders = {part for name in train + valid for part in Path(name).parts[:-1]}
    assert not folders & {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    content = dict(read_corpus("train"))[train[0]]
    assert content == (stdlib_root() / train[0]).read_bytes()


def test_only_source_files_of_the_library_itself(tree):
    train, valid = dict(read_corpus("train", root=tree)), dict(read_corpus("valid", root=tree))
    assert len(train) + len(valid) == 400
    assert b"excluded" not in {**train, **valid}.values()
    assert (train | valid)["package3/module10.py"] == b"000000010\n"


def test_the_split_of_a_file_depends_on_its_name_alone(tree):
    before = {split: set(names(split, root=tree)) for split in ("train", "valid")}
    (tree / "package0" / "new.py").write_text("x = 1")
    (tree / "package3" / "module10.py").unlink()
    after = {split: set(names(split, root=tree)) for split in ("train", "valid")}
    for split in before:
        assert after[split] ^ before[split] <= {"package0/new.py", "package3/module10.py"}


def test_the_split_is_the_same_in_every_process_and_version():
    """Values of SHA-256, written down: a change here moves validation text into training."""
    files = [corpus.CorpusFile(f"package/module{number}.py", Path(), 0) for number in range(60)]
    assert [number for number, file in enumerate(files) if file.split == "valid"] == [5, 9, 12, 37]


def test_a_smaller_limit_keeps_a_subset_of_each_split(tree):
    assert sum(file.num_bytes for file in list_corpus(max_bytes=1005, root=tree)) == 1000
    for split in ("train", "valid"):
        few, many = names(split, max_bytes=1005, root=tree), names(split, max_bytes=3000, root=tree)
        assert set(few) < set(many) < set(names(split, root=tree))


def test_a_python_without_source_text_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(corpus.sysconfig, "get_path", lambda name: str(tmp_path / "python311.zip"))
    with pytest.raises(ValueError, match=r"python311\.zip holds no os\.py \(a zipped or stripped Python\)"):
        list_corpus()


def test_bad_arguments(tree):
    with pytest.raises(ValueError, match=r"max_bytes \(0\) must be at least 1"):
        list_corpus(max_bytes=0, root=tree)
    with pytest.raises(ValueError, match=r"no split 'test'\. Use one of train, valid"):
        read_corpus("test", root=tree)
