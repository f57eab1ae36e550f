"""Memory that lives for one operation: kernels' partial results, gradients on their way, casts of the logits.

Bytes beyond what autograd keeps (`activations`). The sums of the sparse kernels are those of their launches; a test
compares them with the peaks in docs/results. For what PyTorch holds inside a backward pass of its own operations the
largest moment is taken, which is an estimate.
"""

from ...kernels.tuning import TABLE, lookup_order
from ...model.config import Phase
from ...model.parameters import mlp_parameters
from .activations import Activations
from .stages import Held

# Of kernels/block_sparse_attention/launch.py, kernels/block_selection/launch.py and kernels/indexer_loss/
# dense_gradient.py, which need Triton to be imported; a test compares them.
QUERY_CHUNK = 16384
SCORE_BUFFER_BYTES = 4 * 2**30
DIFFERENCE_BYTES, CHUNK_ROWS, WINDOW_KEYS = 2**30, 128, 16384

# Building the reverse index, one stable sort of (row, pair): docs/results/kernels_run1.json, stage reverse_index, is
# 36.4 bytes a pair at its peak for both head shapes at 128K tokens; the index that stays has 4.
REVERSE_INDEX_PEAK, REVERSE_INDEX = 36.4, 4

STREAMING_MULTIPROCESSORS = 132
"""Of H100 and H200; FlashAttention-2's deterministic backward keeps a partial dQ for each share of them."""


def item_queries(op: str, activations: Activations) -> int:
    """Queries of one work item, by the kernels' own table of tiles for Hopper."""
    heads, groups = activations.heads
    sizes = (activations.spec.model.head_dim, heads // groups, activations.itemsize)
    return next(TABLE[key].columns for key in lookup_order(op, "sm90", *sizes) if key in TABLE)


def sparse_forward(a: Activations) -> float:
    """Partial outputs in 16 bits (fp32 for fp32) with two fp32 numbers each, for a chunk of queries."""
    heads, groups = a.heads
    kept, dim = a.spec.attention.top_k, a.spec.model.head_dim
    chunk = min(QUERY_CHUNK, a.tokens)
    pairs = a.tokens * groups * kept
    return max(REVERSE_INDEX_PEAK * pairs, REVERSE_INDEX * pairs + chunk * heads * kept * (a.itemsize * dim + 8))


def sparse_backward(a: Activations) -> float:
    """Gradients, then the slots of a chunk of queries; the indexer's KL is made chunk by chunk beside them.

    dQ; dK and dV in fp32; keys without what they have in common; delta and unit of a row. Slots of dQ, dK and dV, and
    after them the casts of dK and dV.
    """
    heads, groups = a.heads
    attention, dim = a.spec.attention, a.spec.model.head_dim
    kept, tokens, keys = attention.top_k, a.tokens, a.tokens * a.spec.parallel.context
    gradients = a.itemsize * tokens * heads * dim + (8 + a.itemsize) * keys * groups * dim + 8 * tokens * heads
    slots = 2 * _slots(a) * attention.block_size * dim * 4
    partial = min(QUERY_CHUNK, tokens) * heads * kept * a.itemsize * dim + slots
    return gradients + max(REVERSE_INDEX_PEAK * tokens * groups * kept, partial, 2 * a.itemsize * keys * groups * dim)


def indexer_backward(a: Activations) -> float:
    """What the KL adds to `sparse_backward`.

    Gradients of the index heads, the key's in fp32 for each group; index keys without what they have in common; four
    numbers a row and the KL of each kept block. Of a chunk: P in 16 bits (fp32 for fp32), slots of dQ and dK.
    """
    _, groups = a.heads
    attention, keys = a.spec.attention, a.tokens * a.spec.parallel.context
    dim, block, pairs = attention.index_dim, attention.block_size, a.tokens * groups * attention.top_k
    gradients = a.itemsize * a.tokens * groups * dim + (4 * groups + a.itemsize) * keys * dim
    rows = 16 * a.tokens * groups + 4 * pairs
    chunk = min(QUERY_CHUNK, a.tokens) * groups * attention.top_k
    return gradients + rows + chunk * a.itemsize * (block + dim) + _slots(a) * block * dim * 4


def _slots(a: Activations) -> int:
    """Most gradient slots of a chunk of queries: rows of the reverse index that several items share."""
    _, groups = a.heads
    pairs = min(QUERY_CHUNK, a.tokens) * groups * a.spec.attention.top_k
    return max(1, 2 * pairs // item_queries("sparse_attention_bwd", a))


def selection(a: Activations) -> float:
    """Block scores in fp32, at most 4 GiB at once; then a sort of the kept pairs."""
    _, groups = a.heads
    attention, keys = a.spec.attention, a.tokens * a.spec.parallel.context
    scores = 4.0 * a.tokens * groups * (keys / attention.block_size + 1) / 2
    return max(min(scores, SCORE_BUFFER_BYTES), REVERSE_INDEX_PEAK * a.tokens * groups * attention.top_k)


def dense_backward(a: Activations) -> float:
    """FlashAttention-2: dQ twice (its own and the op's), dK and dV for every head, fp32 sums of dQ, one for each split
    of the work in deterministic mode. The units of n x d are checked against the measured peaks in docs/results.
    """
    heads, _ = a.heads
    unit = a.tokens * heads * a.spec.model.head_dim
    splits = -(-STREAMING_MULTIPROCESSORS // heads) if a.deterministic else 1
    keys = a.tokens * a.spec.parallel.context / a.tokens
    gradients = (2 + 2 * keys) * a.itemsize * unit + 4 * splits * unit
    return max(gradients, full_sequence_kl(a)) if a.phase is Phase.warmup else gradients


def full_sequence_kl(a: Activations) -> float:
    """The joint op of the warm-up, before the attention's backward, with documents as long as the sequence.

    Gradients of the index heads, the key's in fp32 for each group; weighted index queries; six numbers a row. P_idx - P
    of a chunk of query rows and a window of keys; where there are several windows, their sums of the query gradient.
    """
    _, groups = a.heads
    dim, keys = a.spec.attention.index_dim, a.tokens * a.spec.parallel.context
    columns = min(WINDOW_KEYS, keys)
    rows = max(DIFFERENCE_BYTES // (a.itemsize * groups * columns) // CHUNK_ROWS, 1) * CHUNK_ROWS
    difference = a.itemsize * min(rows, a.tokens) * groups * columns
    sums = 4 * a.tokens * groups * dim if keys > columns else 0
    return (2 * a.itemsize * a.tokens + 4 * keys) * groups * dim + 24 * a.tokens * groups + difference + sums


def attention(a: Activations, layer: int) -> float:
    """The largest of a layer's attention, forward or backward."""
    if a.phase is Phase.sparse and a.spec.is_msa(layer):
        return max(sparse_forward(a), selection(a), sparse_backward(a) + indexer_backward(a))
    return dense_backward(a)


def mlp(a: Activations, layer: int) -> float:
    """Backward of the MLP or of the experts: gradients of its tensors and of its largest weight.

    Three moments of the experts: gradients of output (twice: as sent and as sorted) and hidden layer with the down
    weights; three fp32 tensors of the hidden layer and one in the training precision, of the product with the
    probabilities; gradients of gate and up (apart and joined) and of the input with their weights.
    """
    spec, size = a.spec, a.itemsize
    hidden = spec.model.hidden_size
    if not spec.is_moe(layer):
        ffn = spec.moe.dense_hidden_size // spec.parallel.tensor
        return size * (a.tokens * (5 * ffn + hidden) + 2 * hidden * ffn)
    pairs, local = a.expert_rows, spec.moe.num_experts // spec.parallel.expert
    ffn = spec.moe.expert_hidden_size // spec.parallel.expert_tensor
    weights = local * mlp_parameters(hidden, ffn) * size
    down = size * pairs * (2 * hidden + ffn) + weights / 3
    product = pairs * ffn * (3 * 4 + size)
    up = size * pairs * (4 * ffn + hidden) + weights * 2 / 3
    gathered = 0.0
    if spec.parallel.dispatcher.name == "allgather":
        gathered = (size + 4) * a.rows * spec.parallel.expert * hidden
    return gathered + max(down, product, up, size * pairs * 3 * hidden)


def head(a: Activations) -> float:
    """Logits in the training precision beside their softmax, then as gradients, with the weight's gradient."""
    model = a.spec.model
    vocabulary = model.vocab_size // a.spec.parallel.tensor
    logits = a.itemsize * a.tokens * vocabulary if a.itemsize == 2 else 0
    return logits + a.itemsize * vocabulary * model.hidden_size + 2 * a.hidden_states


def largest(a: Activations, held: Held) -> dict[str, float]:
    """Operation -> bytes, the largest of each kind on a rank; under recompute with the layer's tensors again.

    Attention's backward comes after the MLP's, whose tensors are gone by then.
    """
    spec, found = a.spec, {"head": 0.0, "attention": 0.0, "MLP": 0.0}
    for slot in held:
        if slot == "head":
            found["head"] = head(a)
        if not isinstance(slot, int):
            continue
        again = max(0, sum(a.layer(slot).values()) - sum(a.kept(slot).values()))
        found["MLP"] = max(found["MLP"], again + mlp(a, slot))
        if spec.recompute.name != "selective":  # which runs the MLP again, but not attention
            found["attention"] = max(found["attention"], again - sum(a.ffn(slot).values()) + attention(a, slot))
        else:
            found["attention"] = max(found["attention"], attention(a, slot))
    return found
