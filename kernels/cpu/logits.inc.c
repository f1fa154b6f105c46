// Passes over one row of logits. The results do not depend on the vector width except exp_sum's last bits.

static struct logits_scan scan_logits(const float *logits, int n) {
    f32x8 top = set8(-INFINITY);
    i32x8 bad = {0};
    int i = 0;
    for (; i + 8 <= n; i += 8) {
        f32x8 x = load8(logits + i);
        bad |= x != x;
        top = max8(top, x);
    }
    struct logits_scan scan = {.top = top8(top), .has_nan = any8(bad)};
    for (; i < n; i++) {
        scan.has_nan |= logits[i] != logits[i];
        if (logits[i] > scan.top) scan.top = logits[i];
    }
    f32x8 wanted = set8(scan.top);
    for (i = 0; i + 8 <= n && !any8(load8(logits + i) == wanted); i += 8) {}
    while (i < n - 1 && logits[i] != scan.top) i++;
    scan.token = i;
    return scan;
}

// sum of exp(l - top): float lanes over 1024 logits at a time, float64 over the parts.
static double exp_sum(const float *logits, int n, float top) {
    double total = 0;
    int i = 0;
    while (i + 8 <= n) {
        f32x8 part = set8(0);
        for (int end = min_int(i + 1024, n); i + 8 <= end; i += 8) part += exp8(load8(logits + i) - set8(top));
        total += (double)sum8(part);
    }
    for (; i < n; i++) total += exp((double)logits[i] - (double)top);
    return total;
}

// Tokens before `token` in the order (logit descending, id ascending).
static int rank_logits(const float *logits, int n, int token) {
    float value = logits[token];
    i32x8 counts = {0};
    int i = 0, rank = 0;
    for (; i + 8 <= n; i += 8) counts -= load8(logits + i) > set8(value);
    for (; i < n; i++) rank += logits[i] > value;
    for (i = 0; i < 8; i++) rank += counts[i];
    for (i = 0; i + 8 <= token; i += 8) {
        i32x8 equal = load8(logits + i) == set8(value);
        if (!any8(equal)) continue;
        for (int lane = 0; lane < 8; lane++) rank -= equal[lane];
    }
    for (; i < token; i++) rank += logits[i] == value;
    return rank;
}

// The first index >= from whose logit is above the threshold, or n.
static int next_above(const float *logits, int from, int n, float threshold) {
    int i = from;
    while (i + 8 <= n && !any8(load8(logits + i) > set8(threshold))) i += 8;
    while (i < n && !(logits[i] > threshold)) i++;
    return i;
}

// exp(x) for -32 ln 2 <= x <= 0 as exp8, with the degree-13 Taylor polynomial: within an ulp or two.
INLINE f64x4 exp4d(f64x4 x) {
    const f64x4 round = set4d(6755399441055744.0);  // 1.5 * 2^52
    f64x4 shifted = x * set4d(1.4426950408889634) + round, n = shifted - round;
    f64x4 r = fma4d(n, set4d(-6.93147180369123816490e-01), x);  // ln 2, its upper 33 bits and the rest
    r = fma4d(n, set4d(-1.90821492927058770002e-10), r);
    f64x4 p = set4d(1.0 / 6227020800.0);
    const double terms[12] = {1.0 / 479001600, 1.0 / 39916800, 1.0 / 3628800, 1.0 / 362880, 1.0 / 40320, 1.0 / 5040,
                              1.0 / 720,       1.0 / 120,      1.0 / 24,      1.0 / 6,      0.5,         1.0};
#pragma GCC unroll 12
    for (int i = 0; i < 12; i++) p = fma4d(p, r, set4d(terms[i]));
    p = fma4d(p, r, set4d(1.0));
    i64x4 power = ((i64x4)shifted - (i64x4)round + 1023) << 52;
    return p * (f64x4)power;
}

// floor(exp((l - top) / temperature) * 2^32) of four logits, 0 where the exponent is below -32 ln 2.
INLINE i64x4 draw_weights4(f32x4 logits, double top, double temperature) {
    const f64x4 least = set4d(-32 * 0.69314718055994530942), magic = set4d(4503599627370496.0);  // 2^52
    f64x4 distance = (__builtin_convertvector(logits, f64x4) - set4d(top)) / set4d(temperature);
    i64x4 inside = distance >= least;
    if (!any4d(inside)) return inside;
    f64x4 weight = exp4d((f64x4)((i64x4)distance & inside)) * set4d(4294967296.0);
    f64x4 whole = (weight + magic) - magic;
    whole += (f64x4)((i64x4)set4d(-1.0) & (whole > weight));
    return ((i64x4)(whole + magic) - (i64x4)magic) & inside;
}

static void draw_weights(const float *logits, int n, float top, double temperature, uint64_t *weights) {
    f32x4 four = {0};
    i64x4 drawn;
    int i = 0;
    for (; i + 4 <= n; i += 4) {
        memcpy(&four, logits + i, sizeof four);
        drawn = draw_weights4(four, (double)top, temperature);
        memcpy(weights + i, &drawn, sizeof drawn);
    }
    memcpy(&four, logits + i, (size_t)(n - i) * sizeof *logits);
    drawn = draw_weights4(four, (double)top, temperature);
    memcpy(weights + i, &drawn, (size_t)(n - i) * sizeof *weights);
}

// Count and sum of the weights >= least.
static struct weight_tail weigh_tail(const uint64_t *weights, int n, uint64_t least) {
    int64_t count = 0, sum = 0;
    for (int i = 0; i < n; i++) {
        int64_t weight = (int64_t)weights[i], inside = weight >= (int64_t)least;
        count += inside;
        sum += inside ? weight : 0;
    }
    return (struct weight_tail){count, (uint64_t)sum};
}

// Zero what comes after (least, last) in the order (weight descending, id ascending).
static void keep_down_to(uint64_t *weights, int n, uint64_t least, int last) {
    for (int i = 0; i < n; i++) {
        int64_t weight = (int64_t)weights[i];
        weights[i] = weight > (int64_t)least || (weight == (int64_t)least && i <= last) ? (uint64_t)weight : 0;
    }
}
