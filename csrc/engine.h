// Engine: operations under way, and who moves them on.
//
// An operation is a small state machine: step() does a bounded piece of work if it can and never blocks. Each lane is a
// queue whose head is moved; lanes are looked at in the order of their urgency, between any two pieces. Whoever waits
// for an operation moves all of them (nothing is handed between threads when a call is followed by its wait); while
// nobody waits, a thread of the engine's own does, and leaves it to the first who waits. Neither holds Python's lock. Small
// operations do not call that thread; it looks by itself now and then while there is traffic, so that one that nobody waits for goes on too.
// Quiet ones leave it asleep altogether: a message that comes lies ready until somebody waits for it.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>

#include "types.h"

namespace echelon {

class Engine;

constexpr int NUM_LANES = 2, NO_LANE = -1;

class Op {
  public:
    virtual ~Op() = default;
    // Moves on as far as it can without blocking, one bounded piece at most. True when anything moved.
    virtual bool step() = 0;
    // The ranks that it waits for just now.
    virtual std::vector<int> behind() const = 0;
    virtual std::string what() const = 0;

    bool over = false;  // set by step(): the result is there
    int lane = 0;       // the higher, the more urgent; NO_LANE for messages between two ranks
    bool small = false; // cheap to begin on the caller's thread
    bool anytime = false;  // … whatever else is under way: a message has no place in any order
    bool quiet = false; // nobody needs it to move before somebody here waits for it

  private:
    friend class Engine;
    std::atomic<uint32_t> state{0};  // 0 under way, 1 met, 2 lost
};


// What connects this rank with the others: how to sleep until something may have changed, and who is gone.
class Transport {
  public:
    virtual ~Transport() = default;
    // arm() … rest() … disarm(): whatever happens after arm() ends the rest at once. The engine looks once more in between.
    // Called by one thread at a time.
    virtual void arm() = 0;
    // Sleeps until a peer did something, wake() was called, or `ns` passed.
    virtual void rest(int64_t ns) = 0;
    virtual void disarm() = 0;
    // Ends a rest() from any thread.
    virtual void wake() = 0;
    // Looks whether one of those we wait for is dead, has left, or gave up; fills `failure` if so.
    virtual bool trouble(const std::vector<int>& behind, Failure& failure) = 0;
    // This rank gives up: the peers that wait for it get to know why.
    virtual void tell(const Failure& failure) = 0;
    // This rank ends in good order.
    virtual void leave() = 0;
    // Messages between two ranks have no common order: they belong to no lane, but to the transport.
    virtual void accept(std::shared_ptr<Op> op) = 0;
    // Moves them on; those that are over go into `finished`. True when anything moved.
    virtual bool serve(std::vector<std::shared_ptr<Op>>& finished) = 0;
    // Gives back those that are not over.
    virtual std::vector<std::shared_ptr<Op>> drop() = 0;
    virtual size_t num_served() const = 0;
    virtual std::vector<int> served_behind() const = 0;

    Engine* engine = nullptr;  // set by the engine that owns it
};

class Engine {
  public:
    explicit Engine(std::unique_ptr<Transport> transport);
    ~Engine();

    // Takes `op` over. Returns at once; a small one with nothing before it, or one that may begin at any time, is begun here, on the caller's thread.
    void submit(std::shared_ptr<Op> op);
    // Blocks until `op` is over: true when it met, false when it was lost. At the deadline the engine gives up.
    bool wait(Op& op, int64_t deadline_ns);
    // Whether `op` is over, after a look at what could be moved on.
    bool poll(Op& op);
    // Like wait, for a moment: true when `op` is over. Whoever gets false waits next.
    bool look(Op& op, int64_t ns);
    bool done(const Op& op) const { return op.state.load(std::memory_order_acquire) != 0; }
    bool met(const Op& op) const { return op.state.load(std::memory_order_acquire) == 1; }

    // From now on everything is lost: what is under way and what comes. The first reason stays. From any thread.
    void fail(Failure failure);
    bool failed() const { return failed_.load(std::memory_order_acquire); }
    // Somebody of this process is inside wait(), and computes nothing.
    bool waited_for() const { return waiting_.load(std::memory_order_relaxed) > 0; }
    Failure failure() const;

    // In a forked child: there is no thread here, and nothing may be used any more.
    void after_fork();

    // Ends in good order: waits for nothing; what is under way is lost.
    void close();
    Transport& transport() { return *transport_; }
    // How long whoever waits looks, and then lets others run between two looks, before sleeping. A core of one's own costs a yield
    // that returns at once; a shared one goes to the peer that is waited for. Set before the first operation.
    int64_t spin_ns = 2000, yield_ns = 300000;

  private:
    void take_in();                       // inbox -> lanes
    bool pump();                          // one pass over everything; true when something moved
    size_t num_under_way() const;
    bool serve();                         // messages alone; true when something moved
    bool loud() const { return under_way_.load() > quiet_.load(); }  // something must go on though nobody waits
    void finish(Op& op, uint32_t state);
    void lose_all();
    void give_up_on(const Op& op);
    // Moves everything on until `op` is over (nullptr: until nothing loud is left or somebody waits), or the deadline. Holds driving_.
    void drive(Op* op, int64_t deadline_ns);
    // While somebody else drives: looks for a while, then sleeps. True when nobody does any more: driving_ is held.
    bool stand_by(const Op& op, int64_t deadline_ns);
    void let_go();                        // of driving_
    void stir();                          // those who stand by: something is over, or nobody drives
    std::vector<int> behind() const;
    void run();                           // the engine's own thread
    void call_thread();
    bool doze(int64_t& ns);               // until called (true), or for `ns`, which grows; 0: until called

    std::unique_ptr<Transport> transport_;
    mutable std::mutex inbox_lock_;       // short: submit and take_in
    std::deque<std::shared_ptr<Op>> inbox_;
    std::atomic<bool> incoming_{false};
    std::mutex driving_;                  // long: whoever moves things on
    std::deque<std::shared_ptr<Op>> lanes_[NUM_LANES];

    std::atomic<bool> failed_{false};
    mutable std::mutex failure_lock_;
    Failure failure_;

    std::thread thread_;
    std::mutex call_lock_;
    std::condition_variable called_;
    bool call_ = false;
    std::atomic<bool> dozing_{false};     // it will look by itself
    std::atomic<bool> closing_{false};
    std::atomic<int64_t> under_way_{0};   // taken over and not over yet
    std::atomic<int64_t> quiet_{0};       // … of these the quiet ones
    std::atomic<int> waiting_{0};         // threads inside wait()
    std::atomic<uint32_t> stirred_{0};    // a futex
    std::atomic<int> standing_by_{0};     // asleep on it
};

// Sleeping on a word. Shared between processes, or only between threads of this one.
void futex_wait(std::atomic<uint32_t>& word, uint32_t seen, int64_t ns, bool shared);
void futex_wake(std::atomic<uint32_t>& word, bool shared);

inline void cpu_pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

}  // namespace echelon
