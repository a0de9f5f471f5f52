"""Spellings that are not fused, and near misses of those that are: the code each must get, and who is to blame."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from idiom_cases import T, W, exact, h, h3, mask
from support import BATCH, FEATURES, VOCAB
from torch.nn import functional as F

INF = math.inf
W2 = exact(torch.Generator().manual_seed(1), 2 * VOCAB, FEATURES)


@dataclass(frozen=True)
class MissCase:
    """One function whose sinks are left alone.

    idiom: the spelling of the catalogue it is, counted as in `idiom_cases`; None for a near miss that nobody writes.
    codes: the miss code of each sink. culprit: part of the first reason.
    """

    name: str
    idiom: int | None
    fn: Callable
    args: tuple
    codes: list[str]
    culprit: str


MISSES: dict[str, MissCase] = {}


def miss(codes: str, culprit: str, *args, idiom: int | None = None) -> Callable:
    """Registers a function whose sinks are misses with ``codes``; the first reason must contain ``culprit``."""

    def register(fn: Callable) -> Callable:
        assert fn.__name__ not in MISSES
        MISSES[fn.__name__] = MissCase(fn.__name__, idiom, fn, args, codes.split(), culprit)
        return fn

    return register


def gumbel_like(x):
    return -torch.log(-torch.log(torch.rand_like(x)))


# -- noise that is nearly right -----------------------------------------------------------------------------------


@miss("NOISE", "aten.sub.Tensor", h, W)
def gumbel_of_wrong_sign(h, W):
    logits = F.linear(h, W)
    return (logits - gumbel_like(logits)).argmax(-1)


@miss("NOISE", "aten.add.Tensor", h, W)
def uneven_gumbel(h, W):
    logits = F.linear(h, W)
    return (logits + torch.linspace(0.5, 1.5, logits.shape[-1]) * gumbel_like(logits)).argmax(-1)


@miss("NOISE", "aten.add.Tensor", h, W)
def uniform_noise(h, W):
    logits = F.linear(h, W)
    return (logits + torch.rand_like(logits)).argmax(-1)


@miss("NOISE", "aten.add.Tensor", h, W)
def normal_noise(h, W):
    logits = F.linear(h, W)
    return (logits + torch.randn_like(logits)).argmax(-1)


@miss("NOISE", "aten.div.Tensor", h, W)
def race_of_logits(h, W):
    logits = F.linear(h, W)
    return (logits / torch.empty_like(logits).exponential_()).argmax(-1)


@miss("NOISE", "broadcast", h, W)
def noise_shared_by_rows(h, W):
    logits = F.linear(h, W)
    return (logits + gumbel_like(logits[0])).argmax(-1)


@miss("NOISE", "broadcast", h, W)
def noise_shared_by_columns(h, W):
    logits = F.linear(h, W)
    return (logits + gumbel_like(logits[:, :1])).argmax(-1)


@miss("NOISE NOISE", "a second time", h, W)
def noise_used_twice(h, W):
    logits = F.linear(h, W)
    noise = gumbel_like(logits)
    return (logits + noise).argmax(-1), (2 * logits + noise).argmax(-1)


@miss("NOISE", "a second time", h, W)
def noise_returned(h, W):
    logits = F.linear(h, W)
    noise = gumbel_like(logits)
    return (logits + noise).argmax(-1), noise


@miss("NOISE", "reads the noise", h, W)
def noise_in_the_mask(h, W):
    logits = F.linear(h, W)
    scores = logits + gumbel_like(logits)
    return torch.where(scores > 3, -INF, scores).argmax(-1)


@miss("NOISE", "aten.expand", h, W)
def noise_expanded(h, W):
    logits = F.linear(h, W)[:1]
    return (logits + gumbel_like(logits)).expand(3, -1).argmax(-1)


@miss("NOISE", "aten.index", h, W)
def noise_of_repeated_rows(h, W):
    logits = F.linear(h, W)
    return (logits + gumbel_like(logits))[[0, 0, 1]].argmax(-1)


@miss("NOISE", "aten.div.Tensor", h, W)
def race_with_a_wide_guard(h, W):
    p = F.linear(h, W).softmax(-1)
    return (p / torch.empty_like(p).exponential_(1).clamp_min(1e-4)).argmax(-1)


@miss("NOISE", "aten.div.Tensor", h, W)
def race_cut_off_at_one(h, W):
    p = F.linear(h, W).softmax(-1)
    return (p / torch.empty_like(p).exponential_(1).clamp(1e-10, 1.0)).argmax(-1)


@miss("NOISE", "aten.sub.Tensor", h, W)
def gumbel_with_a_wide_guard(h, W):
    logits = F.linear(h, W)
    u = torch.rand_like(logits).clamp(1e-3, 1 - 1e-3)
    return (logits - torch.log(-torch.log(u))).argmax(-1)


@miss("NOISE", "aten.sub.Tensor", h, W)
def gumbel_with_a_wide_eps(h, W):
    logits = F.linear(h, W)
    return (logits - torch.log(-torch.log(torch.rand_like(logits) + 1e-5))).argmax(-1)


@miss("NOISE", "aten.mul.Tensor", h, W)
def dropout(h, W):
    return F.dropout(F.linear(h, W), 0.5).argmax(-1)


@miss("LOGITS_ESCAPE LOGITS_ESCAPE", "share one noise tensor", h, W)
def one_noise_for_two_sinks(h, W):
    logits = F.linear(h, W)
    scores = logits + gumbel_like(logits)
    return scores.argmax(-1), scores.max(-1).indices


# -- softmaxes that are nearly right ------------------------------------------------------------------------------


@miss("EPILOGUE_OP", "aten.div.Tensor", h, W)
def softmax_over_rows(h, W):
    return F.linear(h, W).softmax(0).multinomial(1)


@miss("EPILOGUE_OP", "softmax", h3, W)
def softmax_over_positions(h, W):
    return F.linear(h, W).softmax(1)[:, -1].multinomial(1)


@miss("EPILOGUE_OP", "aten.div.Tensor", h, W, T)
def normaliser_from_elsewhere(h, W, total):
    logits = F.linear(h, W)
    weights = (logits - logits.amax(-1, keepdim=True)).exp()
    return (weights / total).multinomial(1)


@miss("EPILOGUE_OP", "aten.neg.default", h, W)
def negative_normaliser(h, W):
    weights = F.linear(h, W).exp()
    return (weights / -weights.sum(-1, keepdim=True)).argmax(-1)


@miss("EPILOGUE_OP", "statistic of the row", h, W)
def normaliser_that_overflows(h, W):
    weights = (30 * F.linear(h, W)).exp()
    return (weights / weights.sum(-1, keepdim=True).half().float()).argmax(-1)


@miss("EPILOGUE_OP", "statistic of the row", h, W)
def normaliser_of_whole_numbers(h, W):
    weights = (F.linear(h, W) - 30).exp()
    return (weights / weights.sum(-1, keepdim=True).int()).argmax(-1)


@miss("EPILOGUE_OP", "aten.relu.default", h, W)
def weights_without_softmax(h, W):
    return F.linear(h, W).relu().multinomial(1)


@miss("EPILOGUE_OP", "aten.pow", h, W)
def reciprocal_probabilities(h, W):
    return (F.linear(h, W).softmax(-1) ** -1.0).multinomial(1)


@miss("EPILOGUE_OP", "aten.pow", h, W, T[:1].expand(1, VOCAB).contiguous())
def probabilities_to_uneven_powers(h, W, t):
    return (F.linear(h, W).softmax(-1) ** t).multinomial(1)


@miss("EPILOGUE_OP", "aten.mul.Tensor", h, W, mask.float())
def probabilities_times_weights(h, W, weights):
    return (F.linear(h, W).softmax(-1) * weights).multinomial(1)


@miss("EPILOGUE_OP", "statistic of the row", h, W)
def logarithm_of_guarded_probabilities(h, W):
    p = F.linear(h, W).softmax(-1)
    return (torch.log(p + 1e-3) - torch.log(-torch.log(torch.rand_like(p)))).argmax(-1)


@miss("EPILOGUE_OP", "statistic of the row", h, W, mask.float())
def weighted_log_probabilities(h, W, weights):
    return (F.log_softmax(F.linear(h, W), -1) * weights).softmax(-1).multinomial(1)


@miss("EPILOGUE_OP", "statistic of the row", h, W, mask.float())
def softcapped_log_probabilities(h, W, b):
    return (F.log_softmax(F.linear(h, W), -1) + b).tanh().softmax(-1).multinomial(1)


# -- processing that looks at the whole row -------------------------------------------------------------------------


@miss("EPILOGUE_OP", "aten.div.Tensor", h, W)
def scaled_by_own_deviation(h, W):
    logits = F.linear(h, W)
    return (logits / logits.std(-1, keepdim=True)).softmax(-1).multinomial(1)


@miss("EPILOGUE_OP", "int32", h, W)
def integer_logits(h, W):
    return F.linear(h, W).int().argmax(-1)


# -- filters --------------------------------------------------------------------------------------------------------


@miss("TOP_K", "aten.topk", h, W, idiom=20)
def top_k_threshold(h, W):
    logits = F.linear(h, W)
    values, _ = torch.topk(logits, 5)
    logits[logits < values[:, [-1]]] = -INF
    return logits.softmax(-1).multinomial(1)


@miss("TOP_K", "aten.topk", h, W, idiom=21)
def top_k_gather(h, W):
    values, ids = torch.topk(F.linear(h, W), 5)
    return ids.gather(1, values.softmax(-1).multinomial(1))


@miss("TOP_P", "sorts or sums along the vocabulary", h, W, idiom=22)
def top_p(h, W):
    logits = F.linear(h, W)
    ordered, ids = torch.sort(logits, descending=True)
    remove = ordered.softmax(-1).cumsum(-1) > 0.9
    remove[..., 1:] = remove[..., :-1].clone()
    remove[..., 0] = False
    logits = logits.masked_fill(remove.scatter(1, ids, remove), -INF)
    return logits.softmax(-1).multinomial(1)


@miss("TOP_K", "aten.sort", h, W, idiom=20)
def top_k_by_sorting(h, W):
    logits = F.linear(h, W)
    threshold = logits.sort(dim=-1, descending=True).values[:, 4:5]
    return torch.where(logits < threshold, -INF, logits).softmax(-1).multinomial(1)


@miss("TOP_K", "aten.kthvalue", h, W, idiom=20)
def top_k_by_kthvalue(h, W):
    logits = F.linear(h, W)
    threshold = logits.kthvalue(VOCAB - 4, dim=-1, keepdim=True).values
    return logits.masked_fill(logits < threshold, -INF).softmax(-1).multinomial(1)


@miss("TOP_P", "sorts or sums along the vocabulary", h, W, idiom=22)
def top_p_gather(h, W):
    ordered, ids = F.linear(h, W).softmax(-1).sort(dim=-1, descending=True)
    before = ordered.cumsum(-1) - ordered
    ordered[before > 0.9] = 0.0
    ordered.div_(ordered.sum(-1, keepdim=True))
    return ids.gather(-1, ordered.multinomial(1))


@miss("TOP_P", "picks the largest logits, as top-k", h, W, idiom=22)
def top_k_then_top_p(h, W):
    logits = F.linear(h, W)
    logits = logits.masked_fill(logits < logits.topk(9).values[:, -1:], -INF)
    ordered, ids = logits.sort(dim=-1)
    remove = ordered.softmax(-1).cumsum(-1) <= 0.1
    return logits.masked_fill(remove.scatter(1, ids, remove), -INF).softmax(-1).multinomial(1)


@miss("TOP_P", "typical-p", h, W)
def typical_p(h, W):
    logits = F.linear(h, W)
    surprise = -logits.log_softmax(-1)
    entropy = (surprise * (-surprise).exp()).sum(-1, keepdim=True)
    ids = (surprise - entropy).abs().argsort(dim=-1)
    mass = logits.gather(1, ids).softmax(-1).cumsum(-1)
    remove = torch.zeros_like(mass, dtype=torch.bool).scatter(1, ids, mass > 0.9)
    return logits.masked_fill(remove, -INF).softmax(-1).multinomial(1)


@miss("MIN_P", "aten.lt.Tensor compares each token with a statistic of its row", h, W, idiom=23)
def min_p(h, W):
    logits = F.linear(h, W)
    p = logits.softmax(-1)
    logits = logits.masked_fill(p < 0.1 * p.max(-1, keepdim=True).values, -INF)
    return logits.softmax(-1).multinomial(1)


@miss("MIN_P", "aten.lt.Tensor", h, W, idiom=23)
def min_p_on_probabilities(h, W):
    p = (F.linear(h, W) / 0.7).softmax(-1)
    p = torch.where(p < 0.1 * p.amax(-1, keepdim=True), 0.0, p)
    return torch.multinomial(p / p.sum(-1, keepdim=True), 1)


@miss("MIN_P", "aten.ge.Tensor", h, W, idiom=23)
def min_p_on_logits(h, W):
    logits = F.linear(h, W)
    keep = logits >= logits.amax(-1, keepdim=True) + math.log(0.1)
    return torch.where(keep, logits, -INF).softmax(-1).multinomial(1)


@miss("MIN_P", "aten.lt.Scalar", h, W, idiom=23)
def min_p_on_differences(h, W):
    logits = F.linear(h, W)
    logits[logits - logits.amax(-1, keepdim=True) < math.log(0.1)] = -INF
    return (logits - torch.log(-torch.log(torch.rand_like(logits)))).argmax(-1)


@miss("MIN_P", "aten.lt.Scalar", h, W)
def epsilon_cutoff(h, W):
    logits = F.linear(h, W)
    return logits.masked_fill(logits.softmax(-1) < 1e-3, -INF).softmax(-1).multinomial(1)


@miss("MIN_P", "aten.lt.Tensor", h, W)
def eta_cutoff(h, W):
    logits = F.linear(h, W)
    logp = logits.log_softmax(-1)
    eta = (0.03 * (logp * logp.exp()).sum(-1, keepdim=True).exp()).clamp(max=1e-3)
    return logits.masked_fill(logp.exp() < eta, -INF).softmax(-1).multinomial(1)


@miss("MIN_P", "top-n-sigma", h, W)
def top_n_sigma(h, W):
    logits = F.linear(h, W)
    least = logits.amax(-1, keepdim=True) - 1.5 * logits.std(-1, keepdim=True)
    return logits.masked_fill(logits < least, -INF).softmax(-1).multinomial(1)


# -- results that somebody else needs -----------------------------------------------------------------------------


@miss("PROBS_ESCAPE", "the logits are also returned", h, W, idiom=24)
def logits_returned(h, W):
    logits = F.linear(h, W)
    return logits.softmax(-1).multinomial(1), logits


@miss("PROBS_ESCAPE", "the probabilities are also returned", h, W, idiom=24)
def probabilities_returned(h, W):
    p = F.linear(h, W).softmax(-1)
    return p.multinomial(1), p


@miss("PROBS_ESCAPE", "over the whole vocabulary is returned", h, W, idiom=24)
def log_probabilities_returned(h, W):
    logits = F.linear(h, W)
    return logits.argmax(-1), logits.log_softmax(-1)


@miss("PROBS_ESCAPE", "the probabilities are also returned", h, W, idiom=24)
def probabilities_and_one_of_them(h, W):
    p = F.linear(h, W).softmax(-1)
    token = p.multinomial(1)
    return token, p.gather(1, token), p


@miss("LOGPROBS", "for numbers per row", h, W, idiom=25)
def log_probability_of_token(h, W):
    logits = F.linear(h, W)
    token = logits.softmax(-1).multinomial(1)
    return token, logits.log_softmax(-1).gather(1, token)


@miss("LOGPROBS", "for numbers per row", h, W, idiom=25)
def log_probability_tempered(h, W):
    logits = F.linear(h, W) / 0.7
    token = (logits - torch.log(-torch.log(torch.rand_like(logits)))).argmax(-1)
    return token, logits.log_softmax(-1)[torch.arange(h.shape[0]), token]


@miss("LOGPROBS", "for numbers per row", h, W, idiom=25)
def log_probability_by_logsumexp(h, W):
    logits = F.linear(h, W)
    token = logits.argmax(-1, keepdim=True)
    return token, logits.gather(-1, token) - logits.logsumexp(-1, keepdim=True)


@miss("LOGPROBS", "the probabilities are also used by aten.gather", h, W, idiom=25)
def probability_of_token(h, W):
    p = F.linear(h, W).softmax(-1)
    token = p.multinomial(1)
    return token, p.gather(-1, token)


@miss("LOGPROBS", "for numbers per row", h, W, idiom=7)
def categorical_log_prob(h, W):
    distribution = torch.distributions.Categorical(logits=F.linear(h, W))
    token = distribution.sample()
    return token, distribution.log_prob(token)


@miss("LOGPROBS", "an entropy", h, W, idiom=7)
def categorical_entropy(h, W):
    distribution = torch.distributions.Categorical(probs=F.linear(h, W).softmax(-1))
    return distribution.sample(), distribution.entropy()


@miss("LOGITS_ESCAPE", "aten.gt.Scalar", h, W)
def count_of_rows(h, W):
    logits = F.linear(h, W)
    return logits.softmax(-1).multinomial(1), (logits > 0).sum(0)


@miss("LOGITS_ESCAPE", "aten.gt.Scalar", h, W)
def count_of_logits(h, W):
    logits = F.linear(h, W)
    return logits.softmax(-1).multinomial(1), (logits > 0).sum()


@miss("LOGITS_ESCAPE", "the logits are also used", h, W)
def mean_probabilities(h, W):
    logits = F.linear(h, W)
    return logits.argmax(-1), logits.softmax(-1).mean(0)


@miss("LOGPROBS", "for numbers per row", h, W)
def mean_entropy(h, W):
    logits = F.linear(h, W)
    logp = logits.log_softmax(-1)
    return logits.argmax(-1), (logp.exp() * logp).sum(-1).mean()


@miss("LOGPROBS", "aten.max.dim", h, W, idiom=25)
def maximum_and_index(h, W):
    value, index = F.linear(h, W).max(-1)
    return value, index


@miss("LOGITS_ESCAPE TOP_K", "another sink (aten.multinomial", h, W)
def greedy_beside_a_filter(h, W):
    logits = F.linear(h, W)
    threshold = logits.topk(5).values[:, -1:]
    return logits.argmax(-1), logits.masked_fill(logits < threshold, -INF).softmax(-1).multinomial(1)


@miss("LOGITS_ESCAPE LOGITS_ESCAPE", "process its logits differently", h, W)
def two_temperatures(h, W):
    logits = F.linear(h, W)
    return logits.softmax(-1).multinomial(1), (logits / 0.5).softmax(-1).multinomial(1)


@miss("LOGITS_ESCAPE LOGITS_ESCAPE", "different rows", h3, W)
def two_positions(h, W):
    logits = F.linear(h, W)
    return logits[:, -1].argmax(-1), logits[:, 0].argmax(-1)


@miss("LAYOUT", "two ways that select different rows", h, W)
def classifier_free_guidance(h, W):
    wanted, unwanted = F.linear(h, W).chunk(2)
    return (unwanted + 1.5 * (wanted - unwanted)).softmax(-1).multinomial(1)


# -- shapes and dtypes --------------------------------------------------------------------------------------------


@miss("NUM_SAMPLES", "2 samples without replacement", h, W, idiom=19)
def without_replacement(h, W):
    return F.linear(h, W).softmax(-1).multinomial(2)


@miss("SAMPLING_DIM", "all dimensions", h, W)
def argmax_of_everything(h, W):
    return F.linear(h, W).argmax()


@miss("SAMPLING_DIM", "dimension 1 of 3", h3, W)
def argmax_over_positions(h, W):
    return F.linear(h, W).argmax(1)


@miss("SAMPLING_DIM", "dimension 0 of 3", h3, W)
def argmax_over_a_batch_of_positions(h, W):
    return F.linear(h, W).argmax(0)


@miss("SAMPLING_DIM", "dimension 1 of 3", h3, W)
def likeliest_position(h, W):
    return F.linear(h, W).softmax(-1).max(1).indices


@miss("LAYOUT", "aten.bmm", exact(torch.Generator().manual_seed(1), BATCH, 2, FEATURES), torch.stack([W, W.flip(0)]))
def product_of_a_batch_of_weights(h, W):
    return torch.einsum("bkd,kvd->bkv", h, W).argmax(-1)


@miss("LAYOUT", "vocabulary", h, W2)
def codebooks_interleaved(h, W):
    return F.linear(h, W).view(-1, VOCAB, 2).argmax(1)


@miss("LAYOUT", "vocabulary", h, torch.cat([W2, W2]))
def codebooks_in_two_dimensions(h, W):
    return F.linear(h, W).view(2 * BATCH, 2, VOCAB).softmax(-1).view(-1, VOCAB).multinomial(1)


@miss("LAYOUT", "one of 80 parts", h, W)
def many_small_parts(h, W):
    return F.linear(h, W).view(-1, 80, 2).argmax(-1)


@miss("LAYOUT", "takes stacked heads apart", h, W2)
def codebooks_reordered(h, W):
    return F.linear(h, W).view(-1, 2, VOCAB)[:, [1, 0]].argmax(-1)


@miss("LAYOUT", "takes stacked heads apart", h, torch.cat([W2, W2]))
def codebooks_left_out(h, W):
    return F.linear(h, W).view(-1, 4, VOCAB)[:, 1:].argmax(-1)


@miss("EPILOGUE_OP", "aten.sum.dim_IntList over", h, W2)
def codebooks_added(h, W):
    return F.linear(h, W).view(-1, 2, VOCAB).sum(1).argmax(-1)


@miss("LAYOUT", "broadcast", h, W2)
def codebooks_less_their_maximum(h, W):
    logits = F.linear(h, W).view(-1, 2, VOCAB)
    return (logits - logits.amax(1, keepdim=True)).argmax(-1)


@miss("NO_LINEAR", "no linear layer", h, W, exact(torch.Generator().manual_seed(1), BATCH, VOCAB))
def codebook_from_elsewhere(h, W, given):
    return torch.stack([F.linear(h, W), given], 1).argmax(-1)


@miss("EPILOGUE_OP", "aten.cat", h3, W)
def positions_stacked(h, W):
    logits = F.linear(h, W)
    return torch.stack([logits[:, -1], logits[:, 0]], 1).argmax(-1)


@miss("NOISE", "broadcast", h, W2)
def noise_shared_by_codebooks(h, W):
    logits = F.linear(h, W).view(-1, 2, VOCAB)
    return (logits + gumbel_like(logits[:, :1])).argmax(-1)


@miss("PROBS_ESCAPE", "the logits are also returned", h, W2, W)
def logits_of_one_codebook_returned(h, W, V):
    one, other = F.linear(h, V), F.linear(h, W[:VOCAB])
    return torch.stack([one, other], 1).view(-1, VOCAB).softmax(-1).multinomial(1), other


@miss("LOGITS_ESCAPE LOGITS_ESCAPE", "different rows or slices", h, W2)
def codebooks_that_overlap(h, W):
    logits = F.linear(h, W)
    return logits.view(-1, 2, VOCAB).argmax(-1), logits[:, 100:200].argmax(-1)


@miss("LAYOUT", "aten.index.Tensor", h, W)
def gathered_vocabulary(h, W):
    return F.linear(h, W)[:, torch.tensor([3, 9, 11])].argmax(-1)


@miss("DTYPE", "torch.float64", h.double(), W.double())
def double_precision(h, W):
    return F.linear(h, W).argmax(-1)


@miss("DTYPE", "torch.float8_e4m3fn", h, W)
def float8_logits(h, W):
    return F.linear(h, W).to(torch.float8_e4m3fn).float().argmax(-1)


@miss("DTYPE", "torch.float8_e5m2", h, W)
def float8_probabilities(h, W):
    return F.linear(h, W).softmax(-1).to(torch.float8_e5m2).float().multinomial(1)


@miss("DTYPE", "torch.float8_e4m3fn", h, W)
def float8_normaliser(h, W):
    weights = F.linear(h, W).exp()
    return (weights / weights.sum(-1, keepdim=True).to(torch.float8_e4m3fn).float()).argmax(-1)


@miss("NOISE", "aten.div.Tensor", h, W)
def float8_noise(h, W):
    p = F.linear(h, W).softmax(-1)
    return (p / torch.empty_like(p).exponential_().to(torch.float8_e4m3fn).float()).argmax(-1)


@miss("NOISE", "aten.add.Tensor", h, W)
def whole_noise(h, W):
    logits = F.linear(h, W)
    return (logits + (2 * gumbel_like(logits)).int()).argmax(-1)


@miss("DTYPE", "1000000000.0 needs float64", h, W)
def float64_with_a_large_offset(h, W):
    return ((F.linear(h, W).double() + 1e9) - 1e9).argmax(-1)


@miss("DTYPE", "32769 needs float64", h, W)
def float64_subtracted_from_an_offset(h, W):
    return torch.rsub(-F.linear(h, W).double(), torch.full((VOCAB,), 32769)).softmax(-1).multinomial(1)


@miss("DTYPE", "600.0 needs float64", h, W)
def float64_with_a_scaled_offset(h, W):
    return torch.add(F.linear(h, W).double(), 600.0, alpha=100).argmax(-1)


@miss("DTYPE", "100000.0 needs float64", h, W)
def float64_log_probabilities_with_an_offset(h, W):
    return (F.linear(h, W).double().log_softmax(-1) - 1e5).argmax(-1)


@miss("DTYPE", "1e-50 needs float64", h, W)
def float64_scaled_out_of_range(h, W):
    return (F.linear(h, W).double() * 1e-50).argmax(-1)


@miss("NO_LINEAR", "no features", h, W)
def linear_without_features(h, W):
    return F.linear(h[:, :0], W[:, :0]).argmax(-1)


@miss("QUANTIZED", "aten._int_mm", (h * 8).to(torch.int8).repeat(8, 1), (W * 8).to(torch.int8))
def int8_product(h, W):
    return torch._int_mm(h, W.t()).argmax(-1)


@miss("NO_LINEAR", "no linear layer", h)
def no_linear(h):
    return (h * 2).argmax(-1)


@miss("NO_LINEAR", "aten.embedding", torch.tensor([3, 1, 4, 1]), W)
def rows_of_a_table(ids, W):
    return F.embedding(ids, W).argmax(-1)


@miss("NO_LINEAR", "prims.rev", h, W[:FEATURES])
def another_layer_behind_the_op(h, W):
    """A product of fewer columns than are sampled is no LM head."""
    hidden = F.linear(h, W)
    return torch.cat([hidden.repeat(1, 2), hidden], 1).flip(-1).argmax(-1)


@miss("EPILOGUE_OP", "prims.rev", h, W)
def unknown_op_between(h, W):
    return F.linear(h, W).flip(-1).argmax(-1)


@miss("EPILOGUE_OP", "aten.avg_pool2d", h, W)
def unknown_op_before_the_softmax(h, W):
    return F.avg_pool1d(F.linear(h, W)[:, None], 3, 1, 1)[:, 0].softmax(-1).multinomial(1)


@miss("EPILOGUE_OP", "aten.cumsum", h, W)
def running_sum_of_logits(h, W):
    return F.linear(h, W).cumsum(-1).softmax(-1).multinomial(1)


@miss("NOISE", "inverse-CDF", h, W)
def inverse_cdf(h, W):
    cdf = F.linear(h, W).softmax(-1).cumsum(-1)
    return (cdf > torch.rand(BATCH, 1)).int().argmax(-1)


@miss("NOISE", "inverse-CDF", h, W)
def inverse_cdf_between_two_sums(h, W):
    p = F.linear(h, W).softmax(-1)
    cdf, u = p.cumsum(-1), torch.rand(BATCH, 1)
    return ((cdf - p <= u) & (cdf - u > 0)).float().argmax(-1)


@miss("EPILOGUE_OP", "a value of its own", h, W, torch.tensor([1, 5, 7]))
def some_logits_raised(h, W, ids):
    logits = F.linear(h, W)
    logits[:, ids] += 2.0
    return logits.softmax(-1).multinomial(1)


@miss("EPILOGUE_OP", "a value of its own", h, W, torch.tensor([1, 5, 7]))
def some_logits_penalised(h, W, ids):
    logits = F.linear(h, W)
    some = logits[:, ids]
    logits[:, ids] = torch.where(some > 0, some / 1.2, some * 1.2)
    return logits.softmax(-1).multinomial(1)


@miss("EPILOGUE_OP", "statistic of the row", h, W)
def guidance_of_log_probabilities(h, W):
    wanted, unwanted = F.linear(h, W).log_softmax(-1).chunk(2)
    return (unwanted + 1.5 * (wanted - unwanted)).argmax(-1)


@miss("NOISE", "aten.div.Tensor", h, W)
def race_of_scaled_uniforms(h, W):
    p = F.linear(h, W).softmax(-1)
    return (p / -torch.rsub(torch.rand_like(p), 1, alpha=0.5).log()).argmax(-1)


@miss("NOISE", "aten.div.Tensor", h, W)
def race_with_a_scaled_guard(h, W):
    p = F.linear(h, W).softmax(-1)
    return (p / torch.add(torch.empty_like(p).exponential_(), 1e-6, alpha=1000000)).argmax(-1)


# -- written in place, and not read where it was written ----------------------------------------------------------


@miss("EPILOGUE_OP", "aten.select_scatter.default", h3, W)
def another_row_than_was_written(h, W):
    logits = F.linear(h, W)
    view = logits[:, -1]
    view += 1
    return logits[:, -2].argmax(-1)


@miss("EPILOGUE_OP", "aten.slice_scatter.default", h, W)
def another_band_than_was_written(h, W):
    logits = F.linear(h, W)
    view = logits[:, 8:]
    view /= 0.7
    return logits[:, 9:].argmax(-1)


@miss("EPILOGUE_OP", "aten.slice_scatter.default", h, W)
def written_to_whole_numbers(h, W):
    logits = F.linear(h, W)
    whole = torch.zeros(logits.shape, dtype=torch.int64)
    return torch.slice_scatter(whole, logits[:, 1:3] * -0.3, 1, 1, 3)[:, 1:3].argmax(-1)


@miss("EPILOGUE_OP", "aten.sin.default", h, W)
def an_op_without_a_spelling(h, W):
    return torch.sin(F.linear(h, W)).argmax(-1)
