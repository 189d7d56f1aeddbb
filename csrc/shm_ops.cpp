#include "shm_ops.h"

#include <string.h>

#include <algorithm>

#include "kernels.h"
#include "stream.h"

namespace echelon {

namespace {

void copy(void* to, const void* from, uint64_t bytes) {
    if (to != from && bytes != 0) memcpy(to, from, bytes);
}

// Rank r's share of n elements: [begin, end), cut at multiples of 16 so that no two ranks write one cache line.
struct Slice { uint64_t begin, end; };
Slice slice(uint64_t n, int rank, int size) {
    uint64_t per = (n / size + 15) / 16 * 16;
    if (per == 0) per = 16;
    return {std::min(n, per * rank), rank == size - 1 ? n : std::min(n, per * (rank + 1))};
}

bool rooted(Kind kind) { return kind == Kind::broadcast || kind == Kind::reduce || kind == Kind::gather || kind == Kind::scatter; }
bool reduces(Kind kind) { return kind == Kind::all_reduce || kind == Kind::reduce || kind == Kind::reduce_scatter; }

}  // namespace

Call call_of(const Request& request) {
    if (request.whole) return *request.whole;
    Call call{};
    call.kind = uint8_t(request.kind);
    call.dtype = uint8_t(request.dtype);
    call.op = uint8_t(request.op);
    call.root = request.root;
    call.count = request.count;
    return call;
}

bool same(const Call& one, const Call& other) {
    return one.kind == other.kind && one.dtype == other.dtype && one.op == other.op && one.root == other.root &&
           (one.count == other.count || Kind(one.kind) == Kind::all_to_all);
}

std::string describe(const Call& call) {
    if (call.whole != 0) {
        Call whole{};
        whole.kind = uint8_t(call.whole);
        whole.op = uint8_t(call.whole >> 8);
        whole.root = int32_t(call.whole >> 16);
        whole.dtype = call.dtype;
        whole.count = call.whole_count;
        return describe(whole);
    }
    Kind kind = Kind(call.kind);
    std::string said = name_of(kind);
    if (reduces(kind)) said += std::string(" (") + name_of(RedOp(call.op)) + ")";
    if (rooted(kind)) said += " with root " + std::to_string(call.root);
    if (kind == Kind::barrier || kind == Kind::all_to_all) return said;
    return said + " of " + std::to_string(call.count) + " " + name_of(DType(call.dtype));
}

Collective::Collective(Engine& engine, Shm& shm, Request request)
    : engine(engine), shm(shm), cursor(shm.cursors[request.lane]), request(std::move(request)), element(size_of(this->request.dtype)) {
    lane = this->request.lane;
    small = bytes() <= (shm.size <= FEW_RANKS ? FEW_SMALL_BYTES : SMALL_BYTES);
}

Collective::~Collective() {
    if (task.handle) task.handle.destroy();
}

std::vector<int> Collective::behind() const {
    return shm.short_of(lane, target);
}

std::string Collective::what() const { return describe(call_of(request)); }

// Tells the others what this rank calls; the first tick makes it visible.
void Collective::begin() {
    number = cursor.number++;
    Call& call = shm.call(lane, shm.rank, number);
    call = {};
    call.kind = uint8_t(request.kind);
    call.dtype = uint8_t(request.dtype);
    call.op = uint8_t(request.op);
    call.root = request.root;
    call.count = request.count;
    if (request.whole) {
        call.whole = uint64_t(1) << 63 | uint64_t(uint32_t(request.whole->root)) << 16 | uint64_t(request.whole->op) << 8 | request.whole->kind;
        call.whole_count = request.whole->count;
    }
    for (uint64_t count : request.counts) call.most = std::max(call.most, count * element);
    if (request.kind == Kind::all_reduce && bytes() >= IN_PLACE_BYTES) call.in_segment = shm.find(request.x, bytes(), call);
    target = cursor.tick;
    task = first();
}

Task Collective::first() {
    switch (request.kind) {
        case Kind::all_reduce: return bytes() >= IN_PLACE_BYTES ? all_reduce() : sliced() ? by_slices() : direct();
        case Kind::reduce: return sliced() ? by_slices() : direct();
        case Kind::reduce_scatter:
        case Kind::scatter: return scatter_like();
        case Kind::all_to_all: return exchange();
        default: return gather_like();
    }
}

bool Collective::step() {
    if (!task.handle) begin();
    else if (!shm.reached(lane, target)) return false;
    task.handle.resume();
    if (!task.handle.done()) return true;
    if (!task.handle.promise().error.empty()) engine.fail({{}, task.handle.promise().error, "broken"});
    if (engine.failed()) return true;
    if (next == nullptr) {
        over = true;
    } else {
        task.handle.destroy();
        task = (this->*next)();
        next = nullptr;
    }
    return true;
}

bool Collective::agreed() {
    const Call& mine = shm.call(lane, shm.rank, number);
    for (int peer = 0; peer < shm.size; peer++) {
        const Call& theirs = shm.call(lane, peer, number);
        if (same(theirs, mine) && theirs.whole == mine.whole && theirs.whole_count == mine.whole_count) continue;
        engine.fail({{}, "the ranks called different operations: rank " + std::to_string(shm.name(shm.rank)) + " " + describe(mine) +
                             ", rank " + std::to_string(shm.name(peer)) + " " + describe(theirs), "mismatch"});
        return false;
    }
    return true;
}

bool Collective::all_in_segment() {
    for (int peer = 0; peer < shm.size; peer++)
        if (!shm.call(lane, peer, number).in_segment) return false;
    return true;
}

// Large: first look whether everybody's x lies in the segment.
Task Collective::all_reduce() {
    co_await until(post());
    if (!agreed()) co_return;
    next = all_in_segment() ? &Collective::in_place : sliced() ? &Collective::by_slices : &Collective::direct;
}

// Each rank adds up its share over all buffers, and writes it into all of them.
Task Collective::in_place() {
    std::vector<char*> buffers;
    for (int peer = 0; peer < shm.size; peer++) buffers.push_back(shm.of_peer(peer, shm.call(lane, peer, number)));
    Slice mine = slice(request.count, shm.rank, shm.size);
    for (uint64_t i = mine.begin; i < mine.end; i += PIECE_BYTES / element) {
        share(std::min(PIECE_BYTES / element, mine.end - i), SHARED_BYTES / element, [&](uint64_t begin, uint64_t end) {
            std::vector<void*> at(shm.size);
            std::vector<const void*> from(shm.size);
            for (int peer = 0; peer < shm.size; peer++) from[peer] = at[peer] = buffers[peer] + (i + begin) * element;
            kernels().fold_to(at.data(), shm.size, from.data(), shm.size, end - begin, request.dtype, request.op);
        });
        co_await std::suspend_always{};
    }
    co_await until(post());
}

// Chunk by chunk: copy mine in, and add up everybody's. One meeting a chunk; the next chunk is in before this one is added up.
Task Collective::direct() {
    const uint64_t per = shm.layout.chunk_bytes / element, num = std::max<uint64_t>(1, (request.count + per - 1) / per);
    const bool lands = request.kind == Kind::all_reduce || request.root == shm.rank;
    const uint32_t turn = cursor.in;
    std::vector<const void*> from(shm.size);
    auto write = [&](uint64_t c) {
        uint64_t n = std::min(per, request.count - c * per);
        shm.put(my_in(), x(c * per), n * element);
        cursor.in++;
        return post();
    };
    uint32_t in_c = write(0);
    for (uint64_t c = 0; c < num; c++) {
        co_await until(in_c);
        if (c == 0 && !agreed()) co_return;
        if (c + 1 < num) in_c = write(c + 1);
        if (lands) {
            uint64_t n = std::min(per, request.count - c * per);
            for (int peer = 0; peer < shm.size; peer++)
                from[peer] = peer == shm.rank ? x(c * per) : in(peer, turn + uint32_t(c));
            kernels().fold(x(c * per), from.data(), shm.size, n, request.dtype, request.op);
        }
    }
}

// Chunk by chunk: copy in what the others add up, add up my share, copy out theirs. Two meetings a chunk, and no rank waits for what the
// others have just begun: a chunk goes in two before it is added up, and out after the next one was. So in(c + 2) takes the place of
// in(c - 1), which all have added up once they posted res(c - 1); res(c + 4) that of res(c), which all have copied once they posted in(c + 4).
Task Collective::by_slices() {
    static_assert(NUM_IN == 3 && NUM_RES == 4);
    const uint64_t per = shm.layout.chunk_bytes / element, num = std::max<uint64_t>(1, (request.count + per - 1) / per);
    const bool lands = request.kind == Kind::all_reduce || request.root == shm.rank;
    const uint32_t turn = cursor.in, res = cursor.res;
    const auto copy_out = bytes() >= STREAM_BYTES ? stream : copy;
    uint32_t in_at[NUM_IN], res_at = 0;
    auto length = [&](uint64_t c) { return std::min(per, request.count - c * per); };
    auto write = [&](uint64_t c) {
        uint64_t n = length(c);
        Slice mine = slice(n, shm.rank, shm.size);
        char* to = my_in();
        share(n - (mine.end - mine.begin), SHARED_BYTES / element, [&](uint64_t begin, uint64_t end) {  // all but mine
            uint64_t early = std::min(end, mine.begin), late = std::max(begin, mine.begin), skip = mine.end - mine.begin;
            if (begin < early) copy(to + begin * element, x(c * per + begin), (early - begin) * element);
            if (late < end) copy(to + (late + skip) * element, x(c * per + late + skip), (end - late) * element);
        });
        cursor.in++;
        in_at[c % NUM_IN] = post();
    };
    auto add_up = [&](uint64_t c) {
        Slice mine = slice(length(c), shm.rank, shm.size);
        share(mine.end - mine.begin, SHARED_BYTES / 2 / element, [&](uint64_t begin, uint64_t end) {
            std::vector<const void*> from(shm.size);
            const uint64_t at = mine.begin + begin;
            for (int peer = 0; peer < shm.size; peer++)
                from[peer] = peer == shm.rank ? x(c * per + at) : in(peer, turn + uint32_t(c), at * element);
            void* to[] = {shm.res(lane, shm.rank, res + uint32_t(c)) + at * element, x(c * per + at)};
            kernels().fold_to(to, lands ? 2 : 1, from.data(), shm.size, end - begin, request.dtype, request.op);
        });
        cursor.res++;
        return post();
    };
    auto take = [&](uint64_t c) {
        share(lands ? shm.size - 1 : 0, 1, [&](uint64_t begin, uint64_t) {
            int peer = int(shm.rank + 1 + begin) % shm.size;  // each begins with another: not all read from one core's cache at a time
            Slice theirs = slice(length(c), peer, shm.size);
            copy_out(x(c * per + theirs.begin), shm.res(lane, peer, res + uint32_t(c)) + theirs.begin * element,
                     (theirs.end - theirs.begin) * element);
        });
    };
    write(0);
    for (uint64_t c = 0; c < num; c++) {
        co_await until(in_at[c % NUM_IN]);
        if (c == 0) {
            if (!agreed()) co_return;
            if (num > 1) write(1);  // only now is everybody done with the operation before
        }
        uint32_t added = add_up(c);
        if (c > 0) co_await until(res_at);
        res_at = added;
        if (c + 2 < num) write(c + 2);
        if (c > 0) take(c - 1);
    }
    co_await until(res_at);
    take(num - 1);
}

// barrier, broadcast, all_gather, gather: everybody (or the root) writes a chunk, everybody (or the root) copies it.
Task Collective::gather_like() {
    const Kind kind = request.kind;
    const uint64_t per = shm.layout.chunk_bytes / element, num = std::max<uint64_t>(1, (request.count + per - 1) / per);
    const bool root = request.root == shm.rank;
    const uint32_t turn = cursor.in;
    auto write = [&](uint64_t c) {
        uint64_t n = std::min(per, request.count - c * per);
        if (kind != Kind::broadcast || root) shm.put(my_in(), x(c * per), n * element);
        cursor.in++;
        return post();
    };
    uint32_t in_c = write(0);
    for (uint64_t c = 0; c < num; c++) {
        co_await until(in_c);
        if (c == 0 && !agreed()) co_return;
        if (c + 1 < num) in_c = write(c + 1);
        uint64_t n = std::min(per, request.count - c * per), t = turn + uint32_t(c);
        if (kind == Kind::broadcast && !root) copy(x(c * per), in(request.root, uint32_t(t)), n * element);
        if (kind == Kind::all_gather || (kind == Kind::gather && root))
            for (int peer = 0; peer < shm.size; peer++)
                copy(out(peer * request.count + c * per), peer == shm.rank ? x(c * per) : in(peer, uint32_t(t)), n * element);
    }
}

// reduce_scatter, scatter: a piece for each rank in every chunk.
Task Collective::scatter_like() {
    const uint64_t piece = shm.layout.chunk_bytes / shm.size / 64 * 64;  // bytes
    const uint64_t per = piece / element, num = std::max<uint64_t>(1, (request.count + per - 1) / per);
    const bool writes = request.kind == Kind::reduce_scatter || request.root == shm.rank;
    const uint32_t turn = cursor.in;
    std::vector<const void*> from(shm.size);
    auto write = [&](uint64_t c) {
        uint64_t n = std::min(per, request.count - c * per);
        for (int peer = 0; peer < shm.size && writes; peer++)
            shm.put(my_in() + peer * piece, x(peer * request.count + c * per), n * element);
        cursor.in++;
        return post();
    };
    uint32_t in_c = write(0);
    for (uint64_t c = 0; c < num; c++) {
        co_await until(in_c);
        if (c == 0 && !agreed()) co_return;
        if (c + 1 < num) in_c = write(c + 1);
        uint64_t n = std::min(per, request.count - c * per);
        uint32_t t = turn + uint32_t(c);
        if (request.kind == Kind::scatter) {
            copy(out(c * per), in(request.root, t, shm.rank * piece), n * element);
        } else {
            for (int peer = 0; peer < shm.size; peer++) from[peer] = in(peer, t, shm.rank * piece);
            kernels().fold(out(c * per), from.data(), shm.size, n, request.dtype, request.op);
        }
    }
}

// all_to_all: a piece for each rank in every chunk, as many chunks as the longest part needs. The first tells the counts.
Task Collective::exchange() {
    const uint64_t table = (shm.size * 8 + 63) / 64 * 64;
    const uint64_t piece = (shm.layout.chunk_bytes - table) / shm.size / 64 * 64;
    std::vector<uint64_t> begin(shm.size), out_begin(shm.size);
    for (int peer = 1; peer < shm.size; peer++) {
        begin[peer] = begin[peer - 1] + request.counts[peer - 1] * element;
        out_begin[peer] = out_begin[peer - 1] + request.out_counts[peer - 1] * element;
    }
    const uint32_t turn = cursor.in;
    auto part = [&](uint64_t bytes, uint64_t c) { return bytes > c * piece ? std::min(piece, bytes - c * piece) : 0; };
    auto write = [&](uint64_t c) {
        uint64_t* counts = reinterpret_cast<uint64_t*>(my_in());
        for (int peer = 0; peer < shm.size; peer++) {
            counts[peer] = request.counts[peer];
            copy(my_in() + table + peer * piece, x() + begin[peer] + c * piece, part(request.counts[peer] * element, c));
        }
        cursor.in++;
        return post();
    };
    uint32_t in_c = write(0);
    uint64_t num = 1;
    for (uint64_t c = 0; c < num; c++) {
        co_await until(in_c);
        if (c == 0) {
            if (!agreed()) co_return;
            for (int peer = 0; peer < shm.size; peer++) {
                num = std::max(num, (shm.call(lane, peer, number).most + piece - 1) / piece);
                uint64_t sends = reinterpret_cast<const uint64_t*>(in(peer, turn))[shm.rank];
                if (sends == request.out_counts[peer]) continue;
                engine.fail({{}, "all_to_all: rank " + std::to_string(peer) + " sends " + std::to_string(sends) + " " +
                                     name_of(request.dtype) + " to rank " + std::to_string(shm.rank) + ", which expects " +
                                     std::to_string(request.out_counts[peer]), "mismatch"});
                co_return;
            }
        }
        if (c + 1 < num) in_c = write(c + 1);
        for (int peer = 0; peer < shm.size; peer++)
            copy(out() + out_begin[peer] + c * piece, in(peer, turn + uint32_t(c), table + shm.rank * piece),
                 part(request.out_counts[peer] * element, c));
    }
}

}  // namespace echelon
