#include "tcp_ops.h"

#include <string.h>

#include <algorithm>

#include "kernels.h"

namespace echelon {

namespace {
void copy(void* to, const void* from, uint64_t bytes) {
    if (to != from && bytes != 0) memcpy(to, from, bytes);
}
}  // namespace

Team Team::everybody(const Tcp& tcp) {
    Team team;
    for (int rank = 0; rank < tcp.size; rank++) team.ranks.push_back(rank);
    team.me = tcp.rank;
    return team;
}

TcpCollective::TcpCollective(Engine& engine, Tcp& tcp, Team team, Request request)
    : engine(engine), tcp(tcp), team(std::move(team)), request(std::move(request)), element(size_of(this->request.dtype)),
      said(call_of(this->request)) {
    lane = this->request.lane;
    small = bytes() <= SMALL_BYTES;
}

TcpCollective::~TcpCollective() {
    if (task.handle) task.handle.destroy();
}

std::string TcpCollective::what() const { return describe(said); }

std::vector<int> TcpCollective::behind() const {
    std::vector<int> ranks;
    for (size_t i = 0; i < inlets.size(); i++)
        if (!inlets[i].done()) ranks.push_back(team.ranks[i % team.ranks.size()]);
    if (ranks.empty() && unsent > 0)
        for (int rank : team.ranks)
            if (rank != tcp.rank) ranks.push_back(rank);
    return ranks;
}

bool TcpCollective::step() {
    if (!task.handle) begin();
    moved = tcp.progress();
    if (engine.failed()) return true;
    if (!task.handle.done()) task.handle.resume();
    if (!task.handle.done()) return moved;
    if (!task.handle.promise().error.empty()) {
        engine.fail({{}, task.handle.promise().error, "broken"});
        return true;
    }
    if (unsent > 0 || !all_landed()) return moved;
    tcp.shut(lane, number);
    for (auto& [memory, capacity] : borrowed) tcp.give_back(std::move(memory), capacity);
    borrowed.clear();
    over = true;
    return true;
}

// --- frames ------------------------------------------------------------------------------------------------------

void TcpCollective::begin() {
    number = tcp.next_number[lane]++;
    tcp.open(lane, number, this);
    task = first();
    task.handle.resume();  // what can leave leaves at once
}

Task TcpCollective::first() {
    Way way = cheapest(request.kind, bytes(), team.size(), tcp.costs);
    if (way == Way::bruck) num_slots = NUM_SLOTS;
    inlets.resize(size_t(num_slots) * team.ranks.size());
    switch (request.kind) {
        case Kind::all_reduce: return way == Way::flat ? flat_reduce() : way == Way::bruck ? doubling() : by_slices();
        case Kind::reduce: return way == Way::flat ? flat_reduce() : by_slices();
        case Kind::reduce_scatter: return by_slices();
        case Kind::broadcast: return way == Way::slices ? spread_slices() : spread();
        case Kind::all_gather:
        case Kind::barrier: return way == Way::bruck ? doubling() : direct();
        default: return direct();
    }
}

int TcpCollective::member_of(int rank) const {
    auto found = std::find(team.ranks.begin(), team.ranks.end(), rank);
    return found == team.ranks.end() ? -1 : int(found - team.ranks.begin());
}

void TcpCollective::expect(int from, uint16_t slot, char* at, uint64_t bytes) {
    Inlet& in = inlet(from, slot);
    in.at = at;
    in.total = bytes;
    in.wanted = true;
}

void TcpCollective::send_chunk(int to, uint16_t slot, const char* from, uint64_t total, uint64_t c) {
    Head head = tcp.head(What::data);
    head.lane = uint8_t(lane);
    head.slot = slot;
    head.number = number;
    head.offset = c * chunk_bytes;
    head.bytes = chunk(total, c);
    head.total = total;
    head.kind = said.kind;
    head.dtype = said.dtype;
    head.op = said.op;
    head.root = said.root;
    head.count = said.count;
    tcp.send(team.ranks[size_t(to)], head, from + head.offset, &unsent);
}

void TcpCollective::send(int to, uint16_t slot, const char* from, uint64_t bytes) {
    for (uint64_t c = 0; c < num_chunks(bytes); c++) send_chunk(to, slot, from, bytes, c);
}

char* TcpCollective::place(int peer, const Head& head) {
    int member = member_of(peer);
    if (member < 0 || !same(said, call_of(head))) {
        tcp.differ(said, peer, head);
        return nullptr;
    }
    if (head.slot >= num_slots || head.offset > head.total || head.bytes > head.total - head.offset) {
        engine.fail({{peer}, "rank " + std::to_string(peer) + " sent a frame that belongs nowhere", "broken"});
        return nullptr;
    }
    Inlet& in = inlet(member, head.slot);
    if (!in.wanted || in.total != head.total) {
        bool uneven = request.kind == Kind::all_to_all;
        engine.fail({{}, uneven ? "all_to_all: rank " + std::to_string(peer) + " sends " + std::to_string(head.total / element) + " " +
                                      name_of(request.dtype) + " to rank " + std::to_string(tcp.rank) + ", which expects " +
                                      std::to_string(in.total / element)
                                : what() + ": rank " + std::to_string(peer) + " and rank " + std::to_string(tcp.rank) +
                                      " went different ways about it",
                     "mismatch"});
        return nullptr;
    }
    const bool whole = in.at != nullptr || (head.offset % chunk_bytes == 0 && head.bytes <= chunk_bytes);
    if (head.bytes > in.total - in.placed || (head.bytes == 0 && in.total != 0) || !whole) {  // never more than all: nothing lands late
        engine.fail({{peer}, "rank " + std::to_string(peer) + " sent a part twice, or one that is none", "broken"});
        return nullptr;
    }
    static char nowhere;  // a place for nothing
    char* at = in.at == nullptr ? nullptr : in.at + head.offset;
    if (head.bytes == 0) {
        at = &nowhere;
    } else if (at == nullptr) {
        uint64_t c = head.offset / chunk_bytes;
        if (window == nullptr || c >= folded + WINDOW) return nullptr;
        at = window + (uint64_t(member) * WINDOW + c % WINDOW) * chunk_bytes;
    }
    in.begun = true;
    in.placed += head.bytes;
    return at;
}

void TcpCollective::landed(int peer, const Head& head) {
    inlet(member_of(peer), head.slot).got += head.bytes;
    if (head.slot == 0 && !arrivals.empty()) arrivals[std::min<size_t>(head.offset / chunk_bytes, arrivals.size() - 1)]++;
}

bool TcpCollective::all_landed() const {
    return std::all_of(inlets.begin(), inlets.end(), [](const Inlet& in) { return in.done(); });
}

char* TcpCollective::scratch(uint64_t bytes) {
    uint64_t capacity = 0;
    auto memory = tcp.borrow(std::max<uint64_t>(bytes, 1), capacity);
    borrowed.emplace_back(std::move(memory), capacity);
    return borrowed.back().first.get();
}

void TcpCollective::fold(void* to, const std::vector<const void*>& from, uint64_t bytes) {
    kernels().fold(to, from.data(), team.size(), bytes / element, request.dtype, request.op);
    moved = true;
}

// A member's share of the data, cut where a cache line begins; the first is the longest.
TcpCollective::Slice TcpCollective::slice(int member) const {
    uint64_t n = uint64_t(team.size());
    if (request.kind == Kind::reduce_scatter) return {uint64_t(member) * bytes(), bytes()};
    uint64_t per = ((bytes() + n - 1) / n + 63) / 64 * 64, begin = std::min(bytes(), per * uint64_t(member));
    return {begin, std::min(bytes(), begin + per) - begin};
}

// --- ways --------------------------------------------------------------------------------------------------------

// all_reduce of little, and reduce of little: everybody's x comes here, and is added up here.
Task TcpCollective::flat_reduce() {
    const bool all = request.kind == Kind::all_reduce, lands = all || request.root == team.me;
    chunk_bytes = std::max<uint64_t>(bytes(), 1);
    char* theirs = lands ? scratch(bytes() * uint64_t(team.size())) : nullptr;
    std::vector<const void*> from(size_t(team.size()));
    for (int step = 1; step < team.size(); step++) {
        int peer = after(step);
        if (lands) expect(peer, 0, theirs + uint64_t(peer) * bytes(), bytes());
        if (all || request.root == peer) send(peer, 0, x(), bytes());
    }
    while (unsent > 0 || !all_landed()) co_await std::suspend_always{};
    if (!lands) co_return;
    for (int peer = 0; peer < team.size(); peer++) from[size_t(peer)] = peer == team.me ? x() : theirs + uint64_t(peer) * bytes();
    fold(x(), from, bytes());
}

// After round k everybody holds the parts of 2^(k+1) members, its own first. (Bruck.)
Task TcpCollective::doubling() {
    const uint64_t part = bytes(), n = uint64_t(team.size());
    chunk_bytes = std::max<uint64_t>(part * n, 1);
    char* parts = scratch(part * n);
    copy(parts, x(), part);
    uint16_t round = 0;
    for (uint64_t have = 1; have < n; have *= 2, round++)
        expect(after(int(have)), round, parts + have * part, std::min(have, n - have) * part);
    round = 0;
    for (uint64_t have = 1; have < n; have *= 2, round++) {
        send(after(int(n - have)), round, parts, std::min(have, n - have) * part);
        while (!inlet(after(int(have)), round).done()) co_await std::suspend_always{};
    }
    if (request.kind == Kind::all_gather)
        for (uint64_t j = 0; j < n; j++) copy(out(uint64_t(after(int(j))) * part), parts + j * part, part);
    if (request.kind != Kind::all_reduce) co_return;
    std::vector<const void*> from(n);
    for (uint64_t j = 0; j < n; j++) from[size_t(after(int(j)))] = parts + j * part;
    fold(x(), from, part);
}

// Each member adds up its share, chunk by chunk as they come, and sends the sum to those who want it. My chunks for the others
// leave first: sums follow in the same streams while the rest is still being added up.
Task TcpCollective::by_slices() {
    const bool all = request.kind == Kind::all_reduce, scatters = request.kind == Kind::reduce_scatter;
    const bool lands = all || (request.kind == Kind::reduce && request.root == team.me);
    const Slice mine = slice(team.me);
    chunk_bytes = std::clamp(slice(0).bytes / 8 / 64 * 64, LEAST_CHUNK, MOST_CHUNK);
    const uint64_t num = num_chunks(mine.bytes);
    window = scratch(uint64_t(team.size()) * WINDOW * chunk_bytes);
    arrivals.assign(num, 0);
    char* sums = scatters ? out() : lands ? x(mine.begin) : scratch(mine.bytes);
    for (int peer = 0; peer < team.size(); peer++) {
        if (peer == team.me) continue;
        expect(peer, 0, nullptr, mine.bytes);
        if (lands) expect(peer, 1, x(slice(peer).begin), slice(peer).bytes);
    }
    for (uint64_t c = 0; c < num_chunks(slice(0).bytes); c++)
        for (int step = 1; step < team.size(); step++) {
            Slice theirs = slice(after(step));
            if (c < num_chunks(theirs.bytes)) send_chunk(after(step), 0, x(theirs.begin), theirs.bytes, c);
        }
    std::vector<const void*> from(size_t(team.size()));
    for (uint64_t c = 0; c < num; c++) {
        while (arrivals[c] + 1 < team.size()) co_await std::suspend_always{};
        for (int peer = 0; peer < team.size(); peer++)
            from[size_t(peer)] = peer == team.me ? x(mine.begin + c * chunk_bytes)
                                                 : window + (uint64_t(peer) * WINDOW + c % WINDOW) * chunk_bytes;
        fold(sums + c * chunk_bytes, from, chunk(mine.bytes, c));
        folded = c + 1;
        for (int step = 1; step < team.size(); step++)
            if (all || (!scatters && request.root == after(step))) send_chunk(after(step), 1, sums, mine.bytes, c);
        co_await std::suspend_always{};  // lets more urgent ones in
    }
}

// Everything goes straight from its place to its place.
Task TcpCollective::direct() {
    const Kind kind = request.kind;
    const bool root = request.root == team.me, uneven = kind == Kind::all_to_all;
    const bool sends_all = kind == Kind::all_gather || kind == Kind::barrier || uneven || (kind == Kind::scatter && root);
    const bool takes_all = kind == Kind::all_gather || kind == Kind::barrier || uneven || (kind == Kind::gather && root);
    std::vector<uint64_t> begin(size_t(team.size()) + 1), out_begin(size_t(team.size()) + 1);
    for (size_t peer = 0; peer < team.ranks.size(); peer++) {
        begin[peer + 1] = begin[peer] + (uneven ? request.counts[peer] * element : bytes());
        out_begin[peer + 1] = out_begin[peer] + (uneven ? request.out_counts[peer] * element : bytes());
    }
    auto source = [&](size_t peer) { return kind == Kind::scatter || uneven ? x(begin[peer]) : x(); };
    auto target = [&](size_t peer) { return kind == Kind::scatter ? out() : out(out_begin[peer]); };
    for (int step = 1; step < team.size(); step++) {
        size_t peer = size_t(after(step));
        if (takes_all || (kind == Kind::scatter && request.root == int(peer)))
            expect(int(peer), 0, target(peer), out_begin[peer + 1] - out_begin[peer]);
        if (sends_all || (kind == Kind::gather && request.root == int(peer)))
            send(int(peer), 0, source(peer), begin[peer + 1] - begin[peer]);
    }
    size_t me = size_t(team.me);
    if (kind != Kind::barrier && (sends_all || takes_all)) copy(target(me), source(me), begin[me + 1] - begin[me]);
    co_return;
}

// From the root down a tree, chunk by chunk: whoever has one passes it on. Flat: the root serves everybody.
Task TcpCollective::spread() {
    const int n = team.size(), place = (team.me - request.root + n) % n;  // the root's is 0
    const bool tree = cheapest(request.kind, bytes(), n, tcp.costs) == Way::tree;
    int reach = 1;  // place p has children p + reach, p + 2 reach, … from the first power of two above p on
    while (tree && reach <= place) reach *= 2;
    std::vector<int> children;
    if (tree)
        for (int child = reach; place + child < n; child *= 2) children.push_back((place + child + request.root) % n);
    else if (place == 0)
        for (int step = 1; step < n; step++) children.push_back(after(step));
    arrivals.assign(num_chunks(bytes()), 0);
    if (place > 0) expect(tree ? (place - reach / 2 + request.root) % n : request.root, 0, x(), bytes());
    for (uint64_t c = 0; c < arrivals.size(); c++) {
        while (place > 0 && arrivals[c] == 0) co_await std::suspend_always{};
        for (int child : children) send_chunk(child, 0, x(), bytes(), c);
    }
}

// The root gives each of the others a share, which passes it on to the rest.
Task TcpCollective::spread_slices() {
    const int n = team.size(), place = (team.me - request.root + n) % n;
    const uint64_t per = ((bytes() + uint64_t(n) - 2) / uint64_t(n - 1) + 63) / 64 * 64;
    auto share = [&](int at) {
        uint64_t begin = std::min(bytes(), per * uint64_t(at - 1));
        return Slice{begin, std::min(bytes(), begin + per) - begin};
    };
    auto member = [&](int at) { return (at + request.root) % n; };
    chunk_bytes = std::clamp(per / 8 / 64 * 64, LEAST_CHUNK, MOST_CHUNK);
    if (place == 0) {
        for (uint64_t c = 0; c < num_chunks(share(1).bytes); c++)
            for (int at = 1; at < n; at++)
                if (c < num_chunks(share(at).bytes)) send_chunk(member(at), 0, x(share(at).begin), share(at).bytes, c);
        co_return;
    }
    const Slice mine = share(place);
    arrivals.assign(num_chunks(mine.bytes), 0);
    expect(request.root, 0, x(mine.begin), mine.bytes);
    for (int at = 1; at < n; at++)
        if (at != place) expect(member(at), 1, x(share(at).begin), share(at).bytes);
    for (uint64_t c = 0; c < arrivals.size(); c++) {
        while (arrivals[c] == 0) co_await std::suspend_always{};
        for (int step = 1; step < n - 1; step++)
            send_chunk(member(1 + (place - 1 + step) % (n - 1)), 1, x(mine.begin), mine.bytes, c);
    }
}

}  // namespace echelon
