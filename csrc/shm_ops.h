// The collective operations in shared memory, each written as the sequence of phases that it is.
#pragma once

#include <coroutine>
#include <optional>

#include "crew.h"
#include "shm.h"

namespace echelon {

// A coroutine that stops where it waits for the others, or lets more urgent ones in.
struct Task {
    struct promise_type {
        std::string error;
        Task get_return_object() { return {std::coroutine_handle<promise_type>::from_promise(*this)}; }
        std::suspend_always initial_suspend() noexcept { return {}; }
        std::suspend_always final_suspend() noexcept { return {}; }
        void return_void() {}
        void unhandled_exception() {
            try {
                throw;
            } catch (const std::exception& e) {
                error = e.what();
            }
        }
    };
    std::coroutine_handle<promise_type> handle;
};

struct Request {
    Kind kind = Kind::barrier;
    DType dtype = DType::f32;
    RedOp op = RedOp::sum;
    int root = 0;
    uint64_t count = 0;               // elements of one rank's part: see the verbs of Group
    void* x = nullptr;
    void* out = nullptr;
    std::vector<uint64_t> counts, out_counts;  // all_to_all, in elements
    int lane = 0;
    std::optional<Call> whole;                 // the operation that this is a part of: that is what people are told
};

// What is called, as others are told.
Call call_of(const Request& request);
bool same(const Call& one, const Call& other);

class Collective final : public Op {
  public:
    Collective(Engine& engine, Shm& shm, Request request);
    ~Collective() override;
    bool step() override;
    std::vector<int> behind() const override;
    std::string what() const override;

  private:
    struct Reached {  // co_await until(tick): goes on when every rank has come that far
        Collective& op;
        bool await_ready() const { return op.shm.reached(op.lane, op.target); }
        void await_suspend(std::coroutine_handle<>) const {}
        void await_resume() const {}
    };
    Reached until(uint32_t tick) {
        target = tick;
        return {*this};
    }
    uint32_t post() {
        shm.post(lane);
        return ++cursor.tick;
    }
    char* my_in() { return shm.in(lane, shm.rank, cursor.in); }
    const char* in(int peer, uint32_t turn, uint64_t offset = 0) { return shm.in(lane, peer, turn) + offset; }

    // One phase function for each shape of traffic; `Lead` begins with a tick of its own.
    Task all_reduce();
    Task in_place();
    Task direct();
    Task by_slices();
    Task gather_like();
    Task scatter_like();
    Task exchange();
    void begin();
    Task first();

    // work(begin, end) over [0, count), with the cores that are this rank's own while its caller waits.
    template <class F> void share(uint64_t count, uint64_t block, F&& work) {
        Crew::of_process().share(count, block, engine.waited_for() ? shm.threads : 1, work);
    }

    bool agreed();  // everybody called the same; otherwise the engine has failed
    bool all_in_segment();
    uint64_t bytes() const { return request.count * element; }
    bool sliced() const { return bytes() > DIRECT_BYTES && shm.size > DIRECT_RANKS; }
    char* x(uint64_t elements = 0) const { return static_cast<char*>(request.x) + elements * element; }
    char* out(uint64_t elements = 0) const { return static_cast<char*>(request.out) + elements * element; }

    static constexpr uint64_t IN_PLACE_BYTES = 65536;  // from here on it pays to look whether x lies in the segment
    static constexpr uint64_t DIRECT_BYTES = 16384;    // up to here every rank adds up everything
    static constexpr int DIRECT_RANKS = 3;             // and with so few ranks always
    static constexpr uint64_t SMALL_BYTES = 262144;    // cheap enough to be done by whoever waits
    static constexpr uint64_t FEW_SMALL_BYTES = 1 << 20;  // … among few ranks
    static constexpr int FEW_RANKS = 4;
    static constexpr uint64_t PIECE_BYTES = 262144;    // between two looks at more urgent ones
    static constexpr uint64_t SHARED_BYTES = 32768;    // what a thread takes at a time where several share it
    static constexpr uint64_t STREAM_BYTES = 8 << 20;  // what is larger is gone from the cache before it is read

    Engine& engine;
    Shm& shm;
    Shm::Cursor& cursor;
    const Request request;
    const uint64_t element;
    uint32_t target = 0, number = 0;
    Task task{};
    Task (Collective::*next)() = nullptr;  // goes on with this one
};

std::string describe(const Call& call);

}  // namespace echelon
