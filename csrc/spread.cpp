#include "spread.h"

#include <algorithm>
#include <cstring>

#include "crew.h"
#include "kernels.h"
#include "stream.h"

namespace echelon {

namespace {

constexpr size_t BLOCK = 8192;        // elements: of two parts, a state and their sum, in float64, half a megabyte
constexpr size_t SQUARES = 4096;      // elements that sum_of_squares adds up at a time: see update.h
constexpr size_t COPIED = 256 << 10;  // bytes
constexpr size_t LARGE = 8 << 20;     // bytes: what is larger is gone from the cache before it is read

template <class T> T* at(T* base, size_t bytes) {
    using Byte = std::conditional_t<std::is_const_v<T>, const char, char>;
    return base == nullptr ? nullptr : static_cast<T*>(reinterpret_cast<Byte*>(base) + bytes);
}
Array at(const Array& a, size_t bytes) { return {at(a.from, bytes), at(a.to, bytes)}; }

Sgd at(Sgd o, size_t bytes) {
    o.momentum_buffer = at(o.momentum_buffer, bytes);
    return o;
}
Adagrad at(Adagrad o, size_t bytes) {
    o.sum = at(o.sum, bytes);
    return o;
}
RmsProp at(RmsProp o, size_t bytes) {
    o.square_avg = at(o.square_avg, bytes);
    o.momentum_buffer = at(o.momentum_buffer, bytes);
    o.grad_avg = at(o.grad_avg, bytes);
    return o;
}
Adam at(Adam o, size_t bytes) {
    o.exp_avg = at(o.exp_avg, bytes);
    o.exp_avg_sq = at(o.exp_avg_sq, bytes);
    o.max_exp_avg_sq = at(o.max_exp_avg_sq, bytes);
    return o;
}

void plain(void* dst, const void* src, size_t bytes) { std::memcpy(dst, src, bytes); }

template <class Own> void spread(void (*kernel)(const Range&, const Own&), const Range& range, const Own& own, const Spread& how) {
    size_t width = size_of(range.dtype);
    if (how.parts.size() == 1 && how.copies.empty() && (how.threads < 2 || range.count <= BLOCK)) {
        Range whole = range;
        whole.grad = how.parts[0];
        return kernel(whole, own);
    }
    Crew::of_process().share(range.count, BLOCK, how.threads, [&](size_t begin, size_t end) {
        alignas(64) thread_local char total[BLOCK * sizeof(double)];
        size_t offset = begin * width, bytes = (end - begin) * width;
        Range block = range;
        block.param = at(range.param, offset);
        block.count = end - begin;
        block.grad = at(how.parts[0], offset);
        if (how.parts.size() > 1) {
            const void* parts[64];
            size_t done = 0;
            while (done < how.parts.size()) {  // 64 at a time: the sum so far is the first of the next
                int num = 0;
                if (done > 0) parts[num++] = total;
                while (num < 64 && done < how.parts.size()) parts[num++] = at(how.parts[done++], offset);
                kernels().fold(total, parts, num, block.count, range.dtype, RedOp::sum);
            }
            block.grad = total;
        }
        kernel(block, at(own, offset));
        for (void* to : how.copies) (how.large ? stream : plain)(at(to, offset), block.param.to, bytes);
    });
}

}  // namespace

void step(const Range& range, const Sgd& own, const Spread& how) { spread(updates().sgd, range, own, how); }
void step(const Range& range, const Adagrad& own, const Spread& how) { spread(updates().adagrad, range, own, how); }
void step(const Range& range, const RmsProp& own, const Spread& how) { spread(updates().rmsprop, range, own, how); }
void step(const Range& range, const Adam& own, const Spread& how) { spread(updates().adam, range, own, how); }

void sum(const std::vector<void*>& dsts, const std::vector<const void*>& srcs, size_t count, DType dtype, int threads) {
    size_t width = size_of(dtype);
    Crew::of_process().share(count, BLOCK, threads, [&](size_t begin, size_t end) {
        std::vector<void*> to;
        std::vector<const void*> from;
        for (void* x : dsts) to.push_back(at(x, begin * width));
        for (const void* x : srcs) from.push_back(at(x, begin * width));
        kernels().fold_to(to.data(), int(to.size()), from.data(), int(from.size()), end - begin, dtype, RedOp::sum);
    });
}

double sum_of_squares(const void* x, size_t count, DType dtype, int threads) {
    if (threads < 2 || count <= SQUARES) return updates().sum_of_squares(x, count, dtype);
    std::vector<double> partial((count + SQUARES - 1) / SQUARES);
    Crew::of_process().share(count, 16 * SQUARES, threads, [&](size_t begin, size_t end) {
        for (size_t here = begin; here < end; here += SQUARES)
            partial[here / SQUARES] = updates().sum_of_squares(at(x, here * size_of(dtype)), std::min(SQUARES, end - here), dtype);
    });
    double total = 0;
    for (double one : partial) total += one;
    return total;
}

bool finite(const void* x, size_t count, DType dtype, int threads) {
    std::atomic<bool> all{true};
    Crew::of_process().share(count, BLOCK, threads, [&](size_t begin, size_t end) {
        if (all.load(std::memory_order_relaxed) && !updates().finite(at(x, begin * size_of(dtype)), end - begin, dtype)) all.store(false);
    });
    return all;
}

bool same(const std::vector<const void*>& as, const std::vector<const void*>& bs, const std::vector<uint64_t>& bytes, int threads) {
    std::atomic<bool> all{true};
    for (size_t i = 0; i < as.size() && all; i++)
        Crew::of_process().share(bytes[i], COPIED, threads, [&](size_t begin, size_t end) {
            if (all.load(std::memory_order_relaxed) && std::memcmp(at(as[i], begin), at(bs[i], begin), end - begin) != 0) all.store(false);
        });
    return all;
}

void copy(void* dst, const void* src, size_t bytes, int threads) {
    if (threads < 2 || bytes <= COPIED) return plain(dst, src, bytes);
    auto one = bytes >= LARGE ? stream : plain;
    Crew::of_process().share(bytes, COPIED, threads, [&](size_t begin, size_t end) { one(at(dst, begin), at(src, begin), end - begin); });
}

}  // namespace echelon
