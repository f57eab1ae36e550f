"""Checkpoints as different layouts write them, read tensor by tensor (field case T6.4)."""

import pytest
import torch

from msa_pretrain.model.hf import ConversionError
from msa_pretrain.training.conversion.stored import CheckpointReader, CheckpointWriter, Chunk
from msa_pretrain.training.conversion.tensor_files import check_space

WHOLE = torch.arange(8 * 2 * 6 * 3.0).view(8, 2, 6, 3)  # [experts, gate and up, f, h]


@pytest.mark.parametrize("experts, ffn", [(1, 1), (4, 1), (8, 1), (2, 2)], ids=["EP=1", "EP=4", "EP=8", "EP=2 x ETP=2"])
def test_experts_come_in_their_order_whatever_layout_wrote_them(tmp_path, experts, ffn):
    size = (8 // experts, 2, 6 // ffn, 3)
    offsets = [(8 // experts * e, 0, 6 // ffn * f, 0) for e in range(experts) for f in range(ffn)]
    writer = CheckpointWriter(tmp_path / "checkpoint", "")
    chunks = [Chunk("model.experts", torch.float32, WHOLE.shape, offset, size) for offset in offsets]

    def make(number):
        e, _, f, _ = offsets[number]
        return WHOLE[e : e + size[0], :, f : f + size[2]].contiguous()

    writer.write(0, chunks, make)
    writer.finish({}, {})
    reader = CheckpointReader(tmp_path / "checkpoint")
    for expert in (*range(8), 2):
        assert torch.equal(reader.read("model.experts", expert), WHOLE[expert : expert + 1])
    assert torch.equal(reader.read("model.experts"), WHOLE)
    assert reader.peak_bytes() == WHOLE.nbytes // experts


def test_a_disk_without_room(tmp_path):
    with pytest.raises(
        ConversionError, match=r"there takes \d[\d,]+ bytes and the disk has [\d,]+\. Choose another --to"
    ):
        check_space(tmp_path / "here" / "there", 10**18)


def test_a_folder_that_is_no_checkpoint(tmp_path):
    with pytest.raises(ConversionError, match="is not a complete checkpoint"):
        CheckpointReader(tmp_path)
