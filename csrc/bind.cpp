// The one file that knows Python: pointers and sizes in, results out. Waiting happens without Python's lock.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <sched.h>

#include "bind_update.h"
#include "hier.h"
#include "kernels.h"
#include "shm_ops.h"
#include "spread.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace echelon;

namespace {

struct Work {
    std::shared_ptr<Engine> engine;
    std::shared_ptr<Op> op;

    bool wait(double seconds) {
        if (engine->done(*op)) return engine->met(*op);
        nb::gil_scoped_release release;
        int64_t limit = seconds > 1e9 ? INT64_MAX : now_ns() + int64_t(std::max(seconds, 0.0) * 1e9);
        return engine->wait(*op, limit);
    }
    // 0: not over within a moment, 1: met, 2: lost.
    int look(int64_t ns) {
        if (!engine->done(*op)) {
            nb::gil_scoped_release release;
            engine->look(*op, ns);
        }
        return !engine->done(*op) ? 0 : engine->met(*op) ? 1 : 2;
    }
    bool poll() { return engine->poll(*op); }
    bool met() const { return engine->met(*op); }
    bool done() const { return engine->done(*op); }
    std::string what() const { return op->what(); }
    int peer() const {
        auto message = dynamic_cast<Message*>(op.get());
        return message == nullptr ? -1 : message->peer;
    }
};

// What every kind of group has: operations in, works out.
class CoreGroup {
  public:
    virtual ~CoreGroup() = default;

    Work collective(int kind, int dtype, int op, int root, uint64_t count, uintptr_t x, uintptr_t out, int lane) {
        Request request;
        request.kind = Kind(kind);
        request.dtype = DType(dtype);
        request.op = RedOp(op);
        request.root = root;
        request.count = count;
        request.x = reinterpret_cast<void*>(x);
        request.out = reinterpret_cast<void*>(out);
        request.lane = lane;
        return submit(std::move(request));
    }

    Work all_to_all(int dtype, uintptr_t x, uintptr_t out, std::vector<uint64_t> counts, std::vector<uint64_t> out_counts, int lane) {
        Request request;
        request.kind = Kind::all_to_all;
        request.dtype = DType(dtype);
        request.x = reinterpret_cast<void*>(x);
        request.out = reinterpret_cast<void*>(out);
        request.counts = std::move(counts);
        request.out_counts = std::move(out_counts);
        request.lane = lane;
        return submit(std::move(request));
    }

    Work message(bool sends, uintptr_t x, uint64_t bytes, int peer, int tag) {
        auto op = std::make_shared<Message>(sends, reinterpret_cast<void*>(x), bytes, peer, tag);
        prepare(*op);
        if (bytes <= Message::SMALL_BYTES) {
            engine_->submit(op);
        } else {
            nb::gil_scoped_release release;  // it may be copied here and now
            engine_->submit(op);
        }
        return {engine_, op};
    }

    virtual nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>> buffer(uint64_t bytes) = 0;

    void abort(std::vector<int> peers, std::string reason) {
        nb::gil_scoped_release release;
        engine_->fail({std::move(peers), std::move(reason)});
    }
    bool failed() const { return engine_->failed(); }
    std::tuple<std::vector<int>, nb::str, std::string> failure() const {
        Failure failure = engine_->failure();
        const std::string& said = failure.reason;  // a peer's words, which may be cut inside a letter
        PyObject* reason = PyUnicode_DecodeUTF8(said.data(), Py_ssize_t(said.size()), "replace");
        return {failure.peers, nb::steal<nb::str>(reason), failure.cause};
    }
    void close() {
        nb::gil_scoped_release release;
        engine_->close();
    }

  protected:
    virtual std::shared_ptr<Op> make(Request request) = 0;
    virtual void prepare(Message&) {}
    std::shared_ptr<Engine> engine_;

  private:
    Work submit(Request request) {
        auto op = make(std::move(request));
        engine_->submit(op);
        return {engine_, op};
    }
};

class ShmGroup final : public CoreGroup {
  public:
    ShmGroup(int rank, int control_fd, const std::vector<int>& arena_fds, uint64_t term) {
        auto shm = std::make_unique<Shm>(rank, control_fd, arena_fds, term);
        shm_ = shm.get();
        engine_ = std::make_shared<Engine>(std::move(shm));
    }

    nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>> buffer(uint64_t bytes) override {
        char* at = shm_->allocate(bytes);
        struct Owner { std::shared_ptr<Engine> engine; Shm* shm; char* at; };
        nb::capsule owner(new Owner{engine_, shm_, at}, [](void* p) noexcept {
            auto* owner = static_cast<Owner*>(p);
            owner->shm->release(owner->at);
            delete owner;
        });
        return nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>>(at, {size_t(bytes)}, owner);
    }

    void after_fork() {
        shm_->after_fork();
        engine_->after_fork();
    }

    // The limit to measure against: an all_reduce of float32 as a bare loop over the ranks' buffers, with nothing around it but two
    // meetings. `buffer` came from buffer() on every rank, with a first page for the meetings; the numbers lie behind it.
    void plain_loop(uintptr_t buffer, uint64_t count) {
        nb::gil_scoped_release release;
        Call call{};
        if (!shm_->find(reinterpret_cast<void*>(buffer), 4096 + 4 * count, call)) throw Error("not a buffer of this group");
        std::vector<char*> all;
        for (int peer = 0; peer < shm_->size; peer++) all.push_back(shm_->of_peer(peer, call));
        auto* arrived = reinterpret_cast<std::atomic<uint32_t>*>(all[0]);
        auto meet = [&] {
            uint32_t size = uint32_t(shm_->size), goal = (arrived->fetch_add(1) / size + 1) * size;
            for (uint32_t turn = 1; int32_t(arrived->load(std::memory_order_acquire) - goal) < 0; turn++)
                turn % 1024 ? cpu_pause() : void(sched_yield());
        };
        uint64_t per = (count / shm_->size + 15) / 16 * 16, begin = std::min(count, per * shm_->rank);
        uint64_t end = shm_->rank == shm_->size - 1 ? count : std::min(count, begin + per);
        std::vector<void*> at;
        for (char* one : all) at.push_back(one + 4096 + 4 * begin);
        meet();
        kernels().fold_to(at.data(), shm_->size, at.data(), shm_->size, end - begin, DType::f32, RedOp::sum);
        meet();
    }

  private:
    std::shared_ptr<Op> make(Request request) override {
        return std::make_shared<Collective>(*engine_, *shm_, std::move(request));
    }
    void prepare(Message& message) override { message.lie_ready(shm_->lying_ready_bytes()); }
    Shm* shm_;  // owned by the engine
};

nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>> plain_buffer(uint64_t bytes) {
    char* at = new (std::align_val_t(64)) char[bytes + 1]();
    nb::capsule owner(at, [](void* p) noexcept { operator delete[](static_cast<char*>(p), std::align_val_t(64)); });
    return nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>>(at, {size_t(bytes)}, owner);
}

class TcpGroup final : public CoreGroup {
  public:
    TcpGroup(int rank, const std::vector<std::vector<int>>& streams, uint64_t term, double limit_s, std::string congestion) {
        auto tcp = std::make_unique<Tcp>(rank, streams, Tcp::Options{term, limit_s, std::move(congestion)});
        tcp_ = tcp.get();
        engine_ = std::make_shared<Engine>(std::move(tcp));
        engine_->spin_ns = engine_->yield_ns = 0;  // a wire is slower than waking up
    }

    nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>> buffer(uint64_t bytes) override { return plain_buffer(bytes); }
    void set_costs(double alpha, double beta, double each) { tcp_->costs = {alpha, beta, each}; }
    void after_fork() {
        tcp_->after_fork();
        engine_->after_fork();
    }

  private:
    std::shared_ptr<Op> make(Request request) override {
        return std::make_shared<TcpCollective>(*engine_, *tcp_, Team::everybody(*tcp_), std::move(request));
    }
    Tcp* tcp_;  // owned by the engine
};

class HierGroup final : public CoreGroup {
  public:
    HierGroup(int rank, std::vector<std::vector<int>> hosts, const std::vector<std::vector<int>>& streams, uint64_t term,
              double limit_s, std::string congestion, int local_rank, int control_fd, const std::vector<int>& arena_fds) {
        auto hier = std::make_unique<Hier>(std::make_unique<Tcp>(rank, streams, Tcp::Options{term, limit_s, std::move(congestion)}),
                                           std::make_unique<Shm>(local_rank, control_fd, arena_fds, term), std::move(hosts));
        hier_ = hier.get();
        engine_ = std::make_shared<Engine>(std::move(hier));
        hier_->belongs_to(engine_.get());
    }

    nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>> buffer(uint64_t bytes) override { return plain_buffer(bytes); }
    void set_costs(double alpha, double beta, double each) { hier_->tcp->costs = {alpha, beta, each}; }
    void after_fork() {
        hier_->tcp->after_fork();
        hier_->shm->after_fork();
        engine_->after_fork();
    }

  private:
    std::shared_ptr<Op> make(Request request) override {
        if (HierCollective::handles(*hier_, request)) return std::make_shared<HierCollective>(*engine_, *hier_, std::move(request));
        return std::make_shared<TcpCollective>(*engine_, *hier_->tcp, Team::everybody(*hier_->tcp), std::move(request));
    }
    Hier* hier_;  // owned by the engine
};

void fold(uintptr_t dst, const std::vector<uintptr_t>& srcs, uint64_t count, int dtype, int op) {
    if (!combines(DType(dtype), RedOp(op)) || srcs.empty()) throw nb::value_error("these elements cannot be combined that way");
    nb::gil_scoped_release release;
    kernels().fold(reinterpret_cast<void*>(dst), reinterpret_cast<const void* const*>(srcs.data()), int(srcs.size()), count,
                   DType(dtype), RedOp(op));
}

Layout layout(uint64_t size, uint64_t chunk_bytes, uint64_t ring_bytes) { return {size, chunk_bytes, ring_bytes}; }

}  // namespace

NB_MODULE(_core, m) {
    nb::set_leak_warnings(false);  // a script's globals may hold groups and buffers when the interpreter ends
    nb::exception<Error>(m, "CoreError", PyExc_OSError);
    std::vector<std::string> dtypes, ops, kinds;
    for (int i = 0; i < int(DType::count); i++) dtypes.push_back(name_of(DType(i)));
    for (int i = 0; i < int(RedOp::count); i++) ops.push_back(name_of(RedOp(i)));
    for (int i = 0; i < int(Kind::count); i++) kinds.push_back(name_of(Kind(i)));
    m.attr("DTYPES") = dtypes;
    m.attr("OPS") = ops;
    m.attr("KINDS") = kinds;

    m.def("isa", [] { return std::string(kernels().name); });
    m.def("isas", &available);
    m.def("choose", &choose, "name"_a);
    m.def("combines", [](int dtype, int op) { return combines(DType(dtype), RedOp(op)); });
    m.def("fold", &fold, "dst"_a, "srcs"_a, "count"_a, "dtype"_a, "op"_a);
    bind_updates(m);
    m.def("format", [](int fd, uint64_t size, uint64_t chunk_bytes, uint64_t ring_bytes, uint64_t term) {
        Shm::format(fd, layout(size, chunk_bytes, ring_bytes), term);
    });
    m.def("reserve", [](int fd, uint64_t size, uint64_t chunk_bytes, uint64_t ring_bytes) {
        Shm::reserve(fd, layout(size, chunk_bytes, ring_bytes));
    });

    nb::class_<Work>(m, "Work")
        .def("wait", &Work::wait, "seconds"_a)
        .def("look", &Work::look)
        .def("poll", &Work::poll)
        .def_prop_ro("met", &Work::met)
        .def_prop_ro("done", &Work::done)
        .def_prop_ro("what", &Work::what)
        .def_prop_ro("peer", &Work::peer);

    m.def("cost", [](int way, int kind, uint64_t bytes, int size, double alpha, double beta, double each) {
        return cost(Way(way), Kind(kind), bytes, size, {alpha, beta, each});
    });
    m.def("way", [](int kind, uint64_t bytes, int size, double alpha, double beta, double each) {
        return std::string(name_of(cheapest(Kind(kind), bytes, size, {alpha, beta, each})));
    });

    nb::class_<CoreGroup>(m, "CoreGroup")
        .def("collective", &CoreGroup::collective)
        .def("all_to_all", &CoreGroup::all_to_all)
        .def("message", &CoreGroup::message)
        .def("buffer", &CoreGroup::buffer)
        .def("abort", &CoreGroup::abort)
        .def_prop_ro("failed", &CoreGroup::failed)
        .def("failure", &CoreGroup::failure)
        .def("close", &CoreGroup::close);
    nb::class_<ShmGroup, CoreGroup>(m, "ShmGroup", nb::is_weak_referenceable())
        .def("plain_loop", &ShmGroup::plain_loop)
        .def("after_fork", &ShmGroup::after_fork)
        .def(nb::init<int, int, const std::vector<int>&, uint64_t>(), "rank"_a, "control_fd"_a, "arena_fds"_a, "term"_a);
    nb::class_<TcpGroup, CoreGroup>(m, "TcpGroup", nb::is_weak_referenceable())
        .def(nb::init<int, const std::vector<std::vector<int>>&, uint64_t, double, std::string>(), "rank"_a, "streams"_a, "term"_a,
             "limit_s"_a, "congestion"_a)
        .def("set_costs", &TcpGroup::set_costs, "alpha"_a, "beta"_a, "each"_a)
        .def("after_fork", &TcpGroup::after_fork);
    nb::class_<HierGroup, CoreGroup>(m, "HierGroup", nb::is_weak_referenceable())
        .def(nb::init<int, std::vector<std::vector<int>>, const std::vector<std::vector<int>>&, uint64_t, double, std::string, int, int,
                      const std::vector<int>&>(),
             "rank"_a, "hosts"_a, "streams"_a, "term"_a, "limit_s"_a, "congestion"_a, "local_rank"_a, "control_fd"_a, "arena_fds"_a)
        .def("set_costs", &HierGroup::set_costs, "alpha"_a, "beta"_a, "each"_a)
        .def("after_fork", &HierGroup::after_fork);
}
