"""A literal oracle of MSA: Python loops over rows, groups, heads and tokens, in float64, from the specification alone.

It never calls the code under test. Its gradients come from autograd through the loops.
"""

import itertools
import math
from types import SimpleNamespace

import pytest
import torch


def fragment_rows(fragments):
    """(query row, position in the document, first key row) of every query in a document."""
    for q_start, q_len, k_start, k_len in fragments:
        for number in range(q_len):
            yield q_start + number, k_len - q_len + number, k_start


def attended(position, block_size, ids):
    """Positions that a query sees: all up to its own, or those of them in the kept blocks."""
    return [j for j in range(position + 1) if ids is None or j // block_size in ids]


def softmax(scores):
    largest = max(float(score.detach()) for score in scores)
    terms = [(score - largest).exp() for score in scores]
    total = sum(terms[1:], terms[0])
    return [term / total for term in terms], largest + float(total.detach().log())


def ids_at(block_indices, row, group):
    return None if block_indices is None else [b for b in block_indices[row, group].tolist() if b >= 0]


def select(index_query, index_key, fragments, *, block_size, num_selected, init_blocks=0):
    """Ids as nested lists [t_q][g][k] and lse [t_q, g]."""
    num_queries, num_groups, index_dim = index_query.shape
    ids = [[[-1] * num_selected for _ in range(num_groups)] for _ in range(num_queries)]
    lse = torch.full((num_queries, num_groups), -math.inf, dtype=torch.float64)
    for row, position, k_start in fragment_rows(fragments):
        for group in range(num_groups):
            q = index_query[row, group].double().tolist()
            dots = [
                math.fsum(a * b for a, b in zip(q, index_key[k_start + j].double().tolist(), strict=True))
                for j in range(position + 1)
            ]
            local = position // block_size
            best = {b: max(dots[j] for j in range(position + 1) if j // block_size == b) for b in range(local + 1)}
            kept = [local]
            for block in range(init_blocks):
                if block <= local and block not in kept:
                    kept.append(block)
            for block in sorted(best, key=lambda b: (-best[b], b)):
                if block not in kept and len(kept) < num_selected:
                    kept.append(block)
            kept = sorted(kept)
            ids[row][group] = kept + [-1] * (num_selected - len(kept))
            terms = [dots[j] / math.sqrt(index_dim) for j in attended(position, block_size, kept)]
            lse[row, group] = max(terms) + math.log(math.fsum(math.exp(term - max(terms)) for term in terms))
    return ids, lse


def attention(query, key, value, block_indices, fragments, *, block_size=1, scale=None):
    """Output [t_q, n, d] with its graph, and lse [t_q, n]; `block_indices` None means all visible tokens."""
    num_queries, num_heads, head_dim = query.shape
    scale = head_dim**-0.5 if scale is None else scale
    heads_per_group = num_heads // key.shape[1]
    zero = torch.zeros(head_dim, dtype=query.dtype)
    output = [[zero] * num_heads for _ in range(num_queries)]
    lse = torch.full((num_queries, num_heads), -math.inf, dtype=torch.float64)
    for row, position, k_start in fragment_rows(fragments):
        for head in range(num_heads):
            group = head // heads_per_group
            tokens = attended(position, block_size, ids_at(block_indices, row, group))
            if not tokens:
                continue
            scores = [scale * (query[row, head] * key[k_start + j, group]).sum() for j in tokens]
            probs, lse[row, head] = softmax(scores)
            terms = [p * value[k_start + j, group] for p, j in zip(probs, tokens, strict=True)]
            output[row][head] = sum(terms[1:], terms[0])
    return torch.stack([torch.stack(heads) for heads in output]), lse


def distributions(index_query, index_key, query, key, row, position, k_start, group, tokens, scale):
    """Teacher as floats and student as scalars with their graph, over `tokens`."""
    heads_per_group = query.shape[1] // key.shape[1]
    teacher = [0.0] * len(tokens)
    for head in range(group * heads_per_group, (group + 1) * heads_per_group):
        scores = [scale * (query[row, head] * key[k_start + j, group]).sum().detach() for j in tokens]
        teacher = [t + float(p) / heads_per_group for t, p in zip(teacher, softmax(scores)[0], strict=True)]
    index_dim = index_query.shape[2]
    scores = [(index_query[row, group] * index_key[k_start + j]).sum() / math.sqrt(index_dim) for j in tokens]
    return teacher, softmax(scores)[0]


def indexer_kl(index_query, index_key, query, key, block_indices, fragments, *, block_size=1, scale=None):
    """KL(P || P_idx) [t_q, g] with its graph."""
    num_queries, num_groups, _ = index_query.shape
    scale = query.shape[2] ** -0.5 if scale is None else scale
    kl = [[torch.zeros((), dtype=torch.float64)] * num_groups for _ in range(num_queries)]
    for row, position, k_start in fragment_rows(fragments):
        for group in range(num_groups):
            tokens = attended(position, block_size, ids_at(block_indices, row, group))
            if len(tokens) < 2:
                continue
            place = (row, position, k_start, group, tokens, scale)
            teacher, student = distributions(index_query, index_key, query, key, *place)
            kl[row][group] = sum(p * (math.log(p) - s.log()) for p, s in zip(teacher, student, strict=True) if p > 0)
    return torch.stack([torch.stack(groups) for groups in kl])


def quality(query, key, index_query, index_key, block_indices, fragments, rows, *, block_size, support):
    """Sums of the measures by name, each a list over groups, and the two counts."""
    num_groups, num_selected = block_indices.shape[1:]
    names = ["block_recall", "score_recall", "captured_mass", "random_block_recall", "random_score_recall"]
    names += ["kl", "kl_uniform", "entropy", "local_fraction", "sink_fraction"]
    sums = {name: [0.0] * num_groups for name in names}
    sums |= {"num_rows": 0, "num_long_rows": 0}
    places = {row: (position, k_start) for row, position, k_start in fragment_rows(fragments)}
    for row in rows:
        if row not in places:
            continue
        position, k_start = places[row]
        local = position // block_size
        sums["num_rows"] += 1
        sums["num_long_rows"] += local + 1 > num_selected
        for group in range(num_groups):
            kept = ids_at(block_indices, row, group)
            tokens = attended(position, block_size, kept if support == "kept" else None)
            place = (row, position, k_start, group)
            scale = query.shape[2] ** -0.5
            teacher, student = distributions(index_query, index_key, query, key, *place, tokens, scale)
            student = [float(s) for s in student]
            sums["kl"][group] += sum(p * math.log(p / s) for p, s in zip(teacher, student, strict=True))
            sums["kl_uniform"][group] += sum(p * math.log(p * len(tokens)) for p in teacher)
            sums["entropy"][group] -= sum(s * math.log(s) for s in student)
            shares = list(zip(tokens, student, strict=True))
            sums["local_fraction"][group] += sum(s for j, s in shares if j // block_size == local)
            sums["sink_fraction"][group] += sum(s for j, s in shares if j // block_size == 0)
            if local + 1 <= num_selected:
                continue
            every = list(range(position + 1))
            full, _ = distributions(index_query, index_key, query, key, *place, every, scale)
            mass = [sum(p for j, p in enumerate(full) if j // block_size == b) for b in range(local + 1)]
            best = sorted(range(local + 1), key=lambda b: (-mass[b], b))[:num_selected]

            def recalls(chosen, best=best, mass=mass):
                both = set(best) & set(chosen)
                return len(both) / len(best), sum(mass[b] for b in both) / sum(mass[b] for b in best)

            # The expectation over all draws, one by one.
            draws = [recalls([local, *others]) for others in itertools.combinations(range(local), num_selected - 1)]
            values = recalls(kept)
            sums["block_recall"][group] += values[0]
            sums["score_recall"][group] += values[1]
            sums["captured_mass"][group] += sum(mass[b] for b in kept)
            sums["random_block_recall"][group] += sum(draw[0] for draw in draws) / len(draws)
            sums["random_score_recall"][group] += sum(draw[1] for draw in draws) / len(draws)
    return sums


@pytest.fixture(scope="session")
def oracle():
    return SimpleNamespace(
        select=select, attention=attention, indexer_kl=indexer_kl, quality=quality, rows=fragment_rows
    )


LAYOUTS = {
    # Documents of 1, 13, 0 and 9 tokens, then 3 rows of padding.
    "packed": (((0, 1, 0, 1), (1, 13, 1, 13), (14, 0, 14, 0), (14, 9, 14, 9)), 26, 26),
    # Two nested ranges of one 17-token document, a padding row between, a 6-token document; keys start at row 2.
    "fragments": (((8, 6, 19, 6), (0, 4, 2, 9), (4, 3, 2, 17)), 15, 27),
    # Decoding: the last token of each of two documents.
    "decode": (((0, 1, 0, 16), (1, 1, 16, 13)), 2, 29),
}


@pytest.fixture(params=list(LAYOUTS))
def layout(request):
    """(fragments, num_queries, num_keys)"""
    return LAYOUTS[request.param]


@pytest.fixture(scope="session")
def make_inputs():
    """Inputs by name. All sizes differ: n=10, g=2, n/g=5, d=7, i=6; tests use block_size=3 and k=4."""

    def build(num_queries, num_keys, *, dtype=torch.float64, seed=0, n=10, g=2, d=7, i=6, requires_grad=False):
        generator = torch.Generator().manual_seed(seed)
        shapes = {
            "query": (num_queries, n, d),
            "key": (num_keys, g, d),
            "value": (num_keys, g, d),
            "index_query": (num_queries, g, i),
            "index_key": (num_keys, i),
        }
        tensors = {
            name: torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
            for name, shape in shapes.items()
        }
        for tensor in tensors.values():
            tensor.requires_grad_(requires_grad)
        return SimpleNamespace(**tensors)

    return build


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    """The sizes are tiny; threads only add waiting."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class TorchDense:
    """`HopperDense` by torch; what it need not write is NaN."""

    def __init__(self, index_query, index_key, query, key, lse, index_lse, weight, scale):
        self.index_query, self.index_key, self.index_lse = index_query, index_key, index_lse
        self.query, self.key, self.lse, self.weight, self.scale = query, key, lse, weight, scale
        self.lift = 4096.0 if index_query.dtype == torch.float16 else 1.0

    def __call__(self, chunk, first_row, first_key, difference):
        assert difference.shape[2] % 256 == 0 and first_key % 256 == 0
        difference.fill_(math.nan)
        num_groups, index_dim = self.index_query.shape[1:]
        window = slice(first_key, first_key + difference.shape[2])
        values = [torch.zeros(1)]
        for q_start, q_len, k_start, k_len in chunk.rows:
            rows, keys = slice(q_start, q_start + q_len), slice(k_start, k_start + k_len)
            query, key = self.query[rows].float().unflatten(1, (num_groups, -1)), self.key[keys].float()
            lse = self.lse[rows].view(*query.shape[:3], 1)
            position = torch.arange(k_len - q_len, k_len)[:, None, None]
            hidden = torch.arange(k_len) > position
            probs = (self.scale * torch.einsum("tghd,kgd->tghk", query, key) - lse).exp().mean(2)
            scores = torch.einsum("tgi,ki->tgk", self.index_query[rows].float(), self.index_key[keys].float())
            log_student = (scores * index_dim**-0.5 - self.index_lse[rows, :, None]).masked_fill(hidden, -1e9)
            probs = probs.masked_fill(hidden, 0)
            terms = (torch.special.xlogy(probs, probs) - probs * log_student)[:, :, window]
            values.append((self.weight[rows, :, None] * terms).sum().view(1))
            # Whole tiles of columns.
            exact = torch.nn.functional.pad(log_student.exp() - probs, (0, -k_len % 256)) * self.lift
            exact.masked_fill_(torch.arange(exact.shape[2]) >= (position // 8 + 1) * 8, math.nan)
            rounded = exact.to(difference.dtype)
            made = difference[q_start - first_row : q_start - first_row + q_len]
            made[:, :, : rounded[:, :, window].shape[2]] = rounded[:, :, window]
            # Rows of tiles of 64 that see up to 128 keys have what the rounding lost.
            item_end = k_len - q_len + torch.arange(q_len) // 64 * 64 + 64
            is_early = item_end.clamp(max=k_len) <= 128
            if first_key == 0:
                made[is_early, :, 128:256] = (exact - rounded.float())[is_early, :, :128].to(difference.dtype)
        return torch.cat(values)


@pytest.fixture
def torch_dense():
    return TorchDense
