"""The sampler's definition, in numpy: the truth that every backend's own sampler must reproduce.

One row of logits l[V] (float32), one slot's `SlotSampling`, the slot's token history, and the absolute
position p of the token being drawn. In this order:

1. repetition r: for every distinct token of the history (prompt and output), l = l / r if l > 0 else l * r.
   frequency f and presence q: for every distinct token of the output part, l -= f * count + q.
   All in float32: l = f32(l - f32(f * count + q)), the product and sum in float64.
2. bias: l[id] += value (float32).
3. masks: l = -inf where `allowed` or the step's mask has no bit; where len < min_len, at `stop_ids`.
   If nothing finite is left the row is reported as not finite.
4. temperature 0: argmax, lowest id on a tie. Otherwise, with m = max l (float32) and T the temperature:
   d = (float64(l) - float64(m)) / T; weight w = floor(exp(d) * 2^32) as uint64, 0 where d < -32 ln 2.
5. min_p: w = 0 where w < ceil(min_p * 2^32).
6. top_k: keep the k largest, ordered by (w descending, id ascending).
7. top_p: in the same order, keep the shortest prefix whose sum >= ceil(top_p * total), at least one.
   (Both are float64 products, rounded up; total is the sum after 6; top_p 0 keeps one token.)
8. draw: r = 64 random bits; t = (r * total) >> 64 in 128-bit arithmetic; the token is the lowest id
   whose running sum of w in id order exceeds t.

Integer weights make the choice independent of the order of summation. The 64 bits come from
Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3") with key = the seed (low
word first) and counter = (p, 0, 0, 0): r = word0 | word1 << 32. So a token depends on the seed and its
position, never on its neighbours in the batch.
"""
