// Random operations among ranks that are threads of one process, checked against what they must give. For sanitizers.
//
//     stress [seed] [operations] [ranks] [0: shared memory, 1: TCP, 2: both]
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <functional>
#include <random>

#include "crew.h"
#include "hier.h"
#include "kernels.h"
#include "spread.h"

using namespace echelon;

namespace {

constexpr uint64_t CHUNK = 65536, RING = 65536;
constexpr int64_t LIMIT_NS = 120'000'000'000;

[[noreturn]] void die(const std::string& what) {
    fprintf(stderr, "stress: %s\n", what.c_str());
    fflush(nullptr);
    _exit(1);
}

// What rank r brings at place i of operation n: small, so that every type adds it up exactly.
int brings(uint64_t n, int r, uint64_t i) { return int((n * 7 + uint64_t(r) * 13 + i * 3 + i / 5) % 3); }

struct Array {
    DType dtype;
    std::vector<char> own;
    char* at;
    Array(DType dtype, uint64_t count, char* elsewhere = nullptr) : dtype(dtype) {
        if (elsewhere == nullptr) own.resize(count * size_of(dtype) + 1);
        at = elsewhere == nullptr ? own.data() : elsewhere;
    }
    void set(uint64_t i, int v) {
        switch (dtype) {
            case DType::f32: reinterpret_cast<float*>(at)[i] = float(v); break;
            case DType::f64: reinterpret_cast<double*>(at)[i] = v; break;
            case DType::i32: reinterpret_cast<int32_t*>(at)[i] = v; break;
            default: at[i] = char(v);
        }
    }
    int get(uint64_t i) const {
        switch (dtype) {
            case DType::f32: return int(reinterpret_cast<float*>(at)[i]);
            case DType::f64: return int(reinterpret_cast<double*>(at)[i]);
            case DType::i32: return reinterpret_cast<int32_t*>(at)[i];
            default: return at[i];
        }
    }
};

struct Flying {
    std::shared_ptr<Op> op;
    std::shared_ptr<Array> x, out;
    std::function<void()> check;
};

// A transport whose look at the peers takes long: what it finds is older than what they did meanwhile.
class LateLook final : public Transport {
  public:
    explicit LateLook(std::unique_ptr<Transport> inner) : inner_(std::move(inner)) {}
    void arm() override { inner_->arm(); }
    void rest(int64_t ns) override { inner_->rest(ns); }
    void disarm() override { inner_->disarm(); }
    void wake() override { inner_->wake(); }
    bool trouble(const std::vector<int>& behind, Failure& failure) override {
        usleep(8000);
        return inner_->trouble(behind, failure);
    }
    void tell(const Failure& failure) override { inner_->tell(failure); }
    void leave() override { inner_->leave(); }
    void accept(std::shared_ptr<Op> op) override { inner_->accept(std::move(op)); }
    bool serve(std::vector<std::shared_ptr<Op>>& finished) override { return inner_->serve(finished); }
    std::vector<std::shared_ptr<Op>> drop() override { return inner_->drop(); }
    size_t num_served() const override { return inner_->num_served(); }
    std::vector<int> served_behind() const override { return inner_->served_behind(); }

  private:
    std::unique_ptr<Transport> inner_;
};

class Rank {
  public:
    using Make = std::function<std::shared_ptr<Op>(Request)>;
    Rank(int rank, int size) : rank(rank), size(size) {}

    void in_memory(std::unique_ptr<Shm> transport, bool looks_late = false) {
        shm = transport.get();
        if (looks_late) own(std::make_unique<LateLook>(std::move(transport)));
        else own(std::move(transport));
        shm->engine = engine.get();
        make = [this](Request r) { return std::make_shared<Collective>(*engine, *shm, std::move(r)); };
    }
    void over_tcp(std::unique_ptr<Tcp> transport, const Costs& costs) {
        Tcp* tcp = transport.get();
        tcp->costs = costs;
        own(std::move(transport));
        make = [this, tcp](Request r) { return std::make_shared<TcpCollective>(*engine, *tcp, Team::everybody(*tcp), std::move(r)); };
    }
    void over_both(std::unique_ptr<Hier> transport, const Costs& costs) {
        Hier* hier = transport.get();
        hier->tcp->costs = costs;
        own(std::move(transport));
        hier->belongs_to(engine.get());
        make = [this, hier](Request r) -> std::shared_ptr<Op> {
            if (HierCollective::handles(*hier, r)) return std::make_shared<HierCollective>(*engine, *hier, std::move(r));
            return std::make_shared<TcpCollective>(*engine, *hier->tcp, Team::everybody(*hier->tcp), std::move(r));
        };
    }

    // The last operation, and away at once: those who wait must get it, although the others have left by then.
    void part(useconds_t late_us) {
        usleep(late_us);
        Request request;
        request.kind = Kind::barrier;
        auto op = make(std::move(request));
        engine->submit(op);
        if (!engine->wait(*op, now_ns() + LIMIT_NS)) die("lost the last barrier: " + engine->failure().reason);
        engine->close();
    }

    // All ranks draw the same numbers, so they call the same operations in the same order.
    bool run(uint64_t seed, uint64_t operations, bool may_end_early) {
        std::mt19937_64 draw(seed);
        std::vector<Flying> flying;
        for (uint64_t n = 0; n < operations; n++) {
            flying.push_back(begin(n, draw));
            if (draw() % 3 != 0 && flying.size() < 8) continue;
            while (!flying.empty()) {  // in any order
                uint64_t which = draw() % flying.size();
                Flying one = std::move(flying[which]);
                flying.erase(flying.begin() + long(which));
                if (!engine->wait(*one.op, now_ns() + LIMIT_NS)) {
                    for (Flying& other : flying) engine->wait(*other.op, now_ns() + LIMIT_NS);  // until then its memory is the engine's
                    if (may_end_early) return false;
                    die("rank " + std::to_string(rank) + " lost " + one.op->what() + ": " + engine->failure().reason);
                }
                one.check();
            }
        }
        for (Flying& one : flying) {
            if (engine->wait(*one.op, now_ns() + LIMIT_NS)) one.check();
            else if (!may_end_early) die("lost at the end: " + engine->failure().reason);
        }
        return !engine->failed();
    }

    const int rank, size;
    Shm* shm = nullptr;  // when it is all there is
    std::unique_ptr<Engine> engine;
    Make make;

  private:
    void own(std::unique_ptr<Transport> transport) {
        engine = std::make_unique<Engine>(std::move(transport));
        engine->spin_ns = 1000;
        engine->yield_ns = 20000;
    }

    Flying begin(uint64_t n, std::mt19937_64& draw) {
        static const DType dtypes[] = {DType::f32, DType::f64, DType::i32, DType::i8};
        static const RedOp ops[] = {RedOp::sum, RedOp::max, RedOp::min};
        Request request;
        request.kind = Kind(draw() % uint64_t(Kind::count));
        request.dtype = dtypes[draw() % 4];
        request.op = ops[draw() % 3];
        request.root = int(draw() % uint64_t(size));
        request.lane = int(draw() % 4 == 0);
        uint64_t scale = draw() % 10, count = scale < 5 ? draw() % 20 : scale < 8 ? draw() % 5000 : draw() % 90000;
        request.count = request.kind == Kind::barrier ? 0 : count;
        bool in_segment = draw() % 3 == 0, mixed = draw() % 4 == 0;
        if (request.kind == Kind::all_to_all) return exchange(n, std::move(request), count);
        bool spread = request.kind == Kind::reduce_scatter || request.kind == Kind::scatter;
        bool gathers = request.kind == Kind::all_gather || request.kind == Kind::gather;
        char* elsewhere = nullptr;
        if (shm != nullptr && in_segment && request.kind == Kind::all_reduce && !(mixed && rank % 2)) {
            elsewhere = shm->allocate(count * size_of(request.dtype) + 1);
            held.push_back(elsewhere);
        }
        auto x = std::make_shared<Array>(request.dtype, count * (spread ? size : 1), elsewhere);
        for (uint64_t i = 0; i < count * uint64_t(spread ? size : 1); i++) x->set(i, brings(n, rank, i));
        auto out = std::make_shared<Array>(request.dtype, count * uint64_t(gathers ? size : 1));
        request.x = x->at;
        request.out = out->at;
        Request asked = request;
        auto op = make(std::move(request));
        engine->submit(op);
        return {op, x, out, [=, this] { check(n, asked, *x, *out); }};
    }

    Flying exchange(uint64_t n, Request request, uint64_t count) {
        uint64_t sends = 0, takes = 0;
        for (int r = 0; r < size; r++) {
            request.counts.push_back(count * uint64_t((rank * 3 + r) % 4) / 3);
            request.out_counts.push_back(count * uint64_t((r * 3 + rank) % 4) / 3);
            sends += request.counts.back();
            takes += request.out_counts.back();
        }
        request.count = 0;
        auto x = std::make_shared<Array>(request.dtype, sends), out = std::make_shared<Array>(request.dtype, takes);
        uint64_t at = 0;
        for (int r = 0; r < size; r++)
            for (uint64_t i = 0; i < request.counts[r]; i++) x->set(at++, brings(n + r, rank, i));
        request.x = x->at;
        request.out = out->at;
        auto counts = request.out_counts;
        auto op = make(std::move(request));
        engine->submit(op);
        return {op, x, out, [=, this] {
                    uint64_t from = 0;
                    for (int r = 0; r < size; r++)
                        for (uint64_t i = 0; i < counts[r]; i++) expect(n, "all_to_all", out->get(from++), brings(n + rank, r, i));
                }};
    }

    int fold(uint64_t n, RedOp op, uint64_t i) const {
        int total = brings(n, 0, i);
        for (int r = 1; r < size; r++) {
            int next = brings(n, r, i);
            total = op == RedOp::sum ? total + next : op == RedOp::max ? std::max(total, next) : std::min(total, next);
        }
        return total;
    }

    void expect(uint64_t n, const char* what, int got, int wanted) const {
        if (got != wanted)
            die("operation " + std::to_string(n) + " " + what + " on rank " + std::to_string(rank) + ": " + std::to_string(got) +
                " instead of " + std::to_string(wanted));
    }

    void check(uint64_t n, const Request& r, const Array& x, const Array& out) const {
        const char* what = name_of(r.kind);
        bool root = r.root == rank;
        for (uint64_t i = 0; i < r.count; i++) switch (r.kind) {
                case Kind::all_reduce: expect(n, what, x.get(i), fold(n, r.op, i)); break;
                case Kind::reduce: expect(n, what, x.get(i), root ? fold(n, r.op, i) : brings(n, rank, i)); break;
                case Kind::broadcast: expect(n, what, x.get(i), brings(n, r.root, i)); break;
                case Kind::reduce_scatter: expect(n, what, out.get(i), fold(n, r.op, uint64_t(rank) * r.count + i)); break;
                case Kind::scatter: expect(n, what, out.get(i), brings(n, r.root, uint64_t(rank) * r.count + i)); break;
                case Kind::all_gather:
                case Kind::gather:
                    for (int peer = 0; peer < size && (root || r.kind == Kind::all_gather); peer++)
                        expect(n, what, out.get(uint64_t(peer) * r.count + i), brings(n, peer, i));
                    break;
                default: break;
            }
    }

    std::vector<char*> held;
};

// Messages in a ring while collectives go on: tags taken in another order than they were sent.
void messages(Rank& rank, uint64_t seed, int rounds) {
    std::mt19937_64 draw(seed);
    int right = (rank.rank + 1) % rank.size, left = (rank.rank + rank.size - 1) % rank.size;
    for (int round = 0; round < rounds; round++) {
        uint64_t bytes = draw() % 3 == 0 ? draw() % 300000 : draw() % 500;
        std::vector<char> a(bytes + 1, char(round)), b(bytes + 1, char(round + 1)), c(bytes + 1), d(bytes + 1);
        std::vector<std::shared_ptr<Op>> ops = {
            std::make_shared<Message>(true, a.data(), bytes, right, 1), std::make_shared<Message>(true, b.data(), bytes, right, 2),
            std::make_shared<Message>(false, d.data(), bytes, left, 2), std::make_shared<Message>(false, c.data(), bytes, left, 1)};
        uint64_t most = rank.shm == nullptr ? Message::SMALL_BYTES : draw() % 2 * RING;  // both ways to go about them
        for (auto& op : ops) {
            if (rank.shm != nullptr) static_cast<Message&>(*op).lie_ready(most);
            rank.engine->submit(op);
        }
        for (auto& op : ops)
            if (!rank.engine->wait(*op, now_ns() + LIMIT_NS)) die("a message was lost: " + rank.engine->failure().reason);
        if (bytes && (c[bytes - 1] != char(round) || d[0] != char(round + 1))) die("a message came wrong");
    }
}

// The segments of `size` ranks of one host; each rank gets descriptors of its own.
struct Segments {
    explicit Segments(int size) {
        Layout layout{uint64_t(size), CHUNK, RING};
        control = memfd_create("control", MFD_CLOEXEC);
        Shm::format(control, layout, 1);
        for (int r = 0; r < size; r++) {
            arenas.push_back(memfd_create("arena", MFD_CLOEXEC));
            Shm::reserve(arenas.back(), layout);
        }
    }
    ~Segments() {
        close(control);
        for (int fd : arenas) close(fd);
    }
    std::unique_ptr<Shm> of(int rank) const {
        std::vector<int> fds;
        for (int fd : arenas) fds.push_back(dup(fd));
        return std::make_unique<Shm>(rank, dup(control), fds, 1);
    }
    int control;
    std::vector<int> arenas;
};

// [rank][peer]: connections, as pairs of sockets.
std::vector<std::vector<std::vector<int>>> connections(int size, int num) {
    std::vector<std::vector<std::vector<int>>> all;
    all.resize(size_t(size), std::vector<std::vector<int>>{size_t(size), std::vector<int>{}});
    for (int a = 0; a < size; a++)
        for (int b = 0; b < a; b++)
            for (int i = 0; i < num; i++) {
                int ends[2];
                if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0) die("no sockets");
                all[size_t(a)][size_t(b)].push_back(ends[0]);
                all[size_t(b)][size_t(a)].push_back(ends[1]);
            }
    return all;
}

enum class Ground { memory, tcp, both, count };

// The ranks of a game, in shared memory, over TCP, or on hosts of several ranks each.
std::vector<std::unique_ptr<Rank>> players(Ground ground, int size, std::mt19937_64& draw) {
    std::vector<std::unique_ptr<Rank>> ranks;
    for (int r = 0; r < size; r++) ranks.push_back(std::make_unique<Rank>(r, size));
    if (ground == Ground::memory) {
        Segments segments(size);
        for (auto& rank : ranks) rank->in_memory(segments.of(rank->rank));
        return ranks;
    }
    static const Costs costs[] = {{1e-9, 1e-6, 0}, {1, 1e-12, 0}, {1e-9, 1e-12, 1}, {}};  // each prefers another way
    const Costs& cost = costs[draw() % 4];
    auto fds = connections(size, 2 + NUM_LANES * int(1 + draw() % 2));
    std::vector<std::vector<int>> hosts(1 + draw() % uint64_t(size));
    for (int r = 0; r < size; r++) hosts[uint64_t(r) < hosts.size() ? uint64_t(r) : draw() % hosts.size()].push_back(r);
    if (ground == Ground::tcp)
        for (auto& rank : ranks)
            rank->over_tcp(std::make_unique<Tcp>(rank->rank, fds[size_t(rank->rank)], Tcp::Options{1, 10, ""}), cost);
    else
        for (auto& host : hosts) {
            Segments segments(int(host.size()));
            for (size_t i = 0; i < host.size(); i++) {
                auto tcp = std::make_unique<Tcp>(host[i], fds[size_t(host[i])], Tcp::Options{1, 10, ""});
                ranks[size_t(host[i])]->over_both(std::make_unique<Hier>(std::move(tcp), segments.of(int(i)), hosts), cost);
            }
        }
    return ranks;
}

// Threads that have long ranges at a time, each shared with the crew: every block is worked on once, and a fused step of parts is what
// its passes one after the other give.
void crew(std::mt19937_64& draw) {
    std::vector<std::thread> callers;
    for (int caller = 0; caller < 3; caller++)
        callers.emplace_back([seed = draw()] {
            std::mt19937_64 own(seed);
            for (int turn = 0; turn < 20; turn++) {
                size_t count = own() % 100000, block = 1 + own() % 5000;
                int threads = 1 + int(own() % 5);
                std::vector<uint8_t> times(count);
                Crew::of_process().share(count, block, threads, [&](size_t begin, size_t end) {
                    for (size_t i = begin; i < end; i++) times[i]++;
                });
                for (uint8_t time : times)
                    if (time != 1) die("the crew worked on a block " + std::to_string(time) + " times");

                std::vector<float> param(count, 3), after(count), a(count, 1), b(count, 2), sum(count), copied(count), whole(count, 3);
                Range range{{param.data(), after.data()}, nullptr, count, DType::f32, 1, 0};
                step(range, Sgd{{}, 0.5, 0, 0, false, false}, {{a.data(), b.data()}, {copied.data()}, threads, own() % 2 == 0});
                echelon::sum({sum.data()}, {a.data(), b.data()}, count, DType::f32, threads);
                updates().sgd({{whole.data(), whole.data()}, sum.data(), count, DType::f32, 1, 0}, Sgd{{}, 0.5, 0, 0, false, false});
                if (after != whole || copied != whole) die("a step shared by threads is another one");
                if (sum_of_squares(a.data(), count, DType::f32, threads) != double(count)) die("squares that threads share");
                copy(sum.data(), after.data(), count * sizeof(float), threads);
                if (!same({sum.data()}, {whole.data()}, {count * sizeof(float)}, threads)) die("a copy that threads share");
                if (!finite(sum.data(), count, DType::f32, threads)) die("what is not finite in it?");
            }
        });
    for (auto& one : callers) one.join();
}

// One comes late to the last operation and leaves while the others look whether it is still there.
void partings(std::mt19937_64& draw) {
    const int size = 3;
    Segments segments(size);
    std::vector<std::unique_ptr<Rank>> ranks;
    for (int r = 0; r < size; r++) {
        ranks.push_back(std::make_unique<Rank>(r, size));
        ranks.back()->in_memory(segments.of(r), true);
    }
    std::vector<std::thread> threads;
    for (auto& rank : ranks)
        threads.emplace_back([&, late = rank->rank == 0 ? useconds_t(16000 + draw() % 6000) : 0] { rank->part(late); });
    for (auto& thread : threads) thread.join();
}

}  // namespace

int main(int argc, char** argv) {
    uint64_t seed = argc > 1 ? strtoull(argv[1], nullptr, 10) : uint64_t(now_ns());
    uint64_t operations = argc > 2 ? strtoull(argv[2], nullptr, 10) : 2000;
    int most = argc > 3 ? atoi(argv[3]) : 5;
    printf("stress: seed %llu, %llu operations, 2 to %d ranks, %s kernels\n", (unsigned long long)seed, (unsigned long long)operations,
           most, kernels().name);
    std::mt19937_64 draw(seed);
    uint64_t done = 0, ended = 0;
    for (int game = 0; done < operations; game++) {
        int size = 2 + int(draw() % uint64_t(most - 1));
        Ground ground = Ground(argc > 4 ? atoi(argv[4]) : int(draw() % uint64_t(Ground::count)));
        auto ranks = players(ground, size, draw);
        uint64_t part = 50 + draw() % 200, game_seed = draw();
        bool cancels = draw() % 4 == 0;
        int64_t when_us = int64_t(draw() % 30000);
        std::vector<std::thread> threads;
        std::atomic<int> lost{0};
        for (auto& rank : ranks)
            threads.emplace_back([&, part] {
                if (!rank->run(game_seed, part, cancels)) lost++;
                if (!cancels) messages(*rank, game_seed, 10);
            });
        if (cancels) {
            usleep(useconds_t(when_us));
            ranks[size_t(game) % ranks.size()]->engine->fail({{}, "cancelled on purpose"});
        }
        for (auto& thread : threads) thread.join();
        for (auto& rank : ranks) rank->engine->close();
        ranks.clear();
        if (game % 4 == 0) crew(draw);
        partings(draw);
        done += part;
        ended += uint64_t(lost > 0);
    }
    printf("stress: %llu operations were right, %llu games were cancelled and ended clean\n", (unsigned long long)done, (unsigned long long)ended);
    return 0;
}
