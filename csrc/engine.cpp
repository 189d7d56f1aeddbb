#include "engine.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace echelon {

namespace {
constexpr int64_t MS = 1000000;
constexpr int64_t REST_NS = 5 * MS;   // the longest sleep without a look at the peers
constexpr int64_t LOOK_NS = 8 * MS;    // how often the peers' lives are looked at while waiting
constexpr int64_t DOZE_NS = MS, LONGEST_DOZE_NS = 16 * MS;  // between two looks of the engine's thread, while there is traffic
constexpr int MOST_TURNS = 4;         // that a caller moves messages on, while others may be under way too
constexpr uint32_t MET = 1, LOST = 2;
}  // namespace

void futex_wait(std::atomic<uint32_t>& word, uint32_t seen, int64_t ns, bool shared) {
    timespec limit{time_t(ns / 1000000000), long(ns % 1000000000)};
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), shared ? FUTEX_WAIT : FUTEX_WAIT_PRIVATE, seen, &limit, nullptr, 0);
}

void futex_wake(std::atomic<uint32_t>& word, bool shared) {
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), shared ? FUTEX_WAKE : FUTEX_WAKE_PRIVATE, INT32_MAX, nullptr, nullptr, 0);
}

Engine::Engine(std::unique_ptr<Transport> transport) : transport_(std::move(transport)) { transport_->engine = this; }

Engine::~Engine() { close(); }

void Engine::submit(std::shared_ptr<Op> op) {
    Op* raw = op.get();
    under_way_++;
    if (raw->quiet) quiet_++;  // after the other count, and before it in finish(): nothing loud is ever taken for quiet
    if (failed()) return finish(*raw, LOST);
    {
        std::lock_guard hold(inbox_lock_);
        inbox_.push_back(std::move(op));
        incoming_.store(true, std::memory_order_release);
    }
    if (raw->small && driving_.try_lock()) {
        take_in();
        bool begun = raw->anytime || num_under_way() == 1;  // here; finished by whoever waits for it, or by the thread when it looks
        if (raw->anytime) for (int turn = 0; turn < MOST_TURNS && !done(*raw) && serve(); turn++) {}
        else if (begun) pump();
        let_go();
        if (begun && (done(*raw) || dozing_.load())) return;
    }
    if (raw->quiet) return;
    transport_->wake();  // whoever drives now has one more
    call_thread();
}

bool Engine::wait(Op& op, int64_t deadline_ns) {
    waiting_++;
    while (!done(op)) {
        if (failed()) {
            driving_.lock();  // soon free: whoever drives sees the failure too
            lose_all();
            let_go();
        } else if (driving_.try_lock() || stand_by(op, deadline_ns)) {
            drive(&op, deadline_ns);
            let_go();
        }
        if (!done(op) && now_ns() >= deadline_ns) give_up_on(op);
    }
    waiting_--;
    if (loud()) call_thread();  // what the others wait for must go on
    return met(op);
}

bool Engine::look(Op& op, int64_t ns) {
    waiting_++;
    if (!failed() && driving_.try_lock()) {
        drive(&op, now_ns() + ns);
        let_go();
    }
    waiting_--;
    return done(op);
}

bool Engine::stand_by(const Op& op, int64_t deadline_ns) {
    int64_t began = now_ns();
    for (uint32_t turn = 1; !done(op) && !failed(); turn++) {
        if (driving_.try_lock()) return true;
        cpu_pause();
        if (turn == 16) transport_->wake();  // the engine's thread may be asleep: it leaves to those who wait
        if (turn % 16 == 0 && now_ns() - began >= spin_ns) break;
    }
    standing_by_++;
    uint32_t seen = stirred_.load();
    int64_t left = deadline_ns - now_ns();
    bool mine = driving_.try_lock();
    if (!mine && !done(op) && !failed() && left > 0) futex_wait(stirred_, seen, std::min(left, REST_NS), false);
    standing_by_--;
    return mine;
}

void Engine::let_go() {
    driving_.unlock();
    if (waiting_.load() > 0) stir();
}

void Engine::stir() {
    stirred_++;
    if (standing_by_.load() > 0) futex_wake(stirred_, false);
}

void Engine::give_up_on(const Op& op) {
    std::string names;
    std::vector<int> peers = op.behind();
    for (int peer : peers) names += (names.empty() ? "" : ", ") + std::to_string(peer);
    fail({peers, op.what() + ": not over in time" + (names.empty() ? "" : ", waiting for rank " + names), "late"});
}

bool Engine::poll(Op& op) {
    if (!done(op) && driving_.try_lock()) {
        failed() ? lose_all() : void(pump());
        let_go();
    }
    return done(op);
}

void Engine::take_in() {
    if (!incoming_.load(std::memory_order_acquire)) return;
    std::lock_guard hold(inbox_lock_);
    for (auto& op : inbox_) {
        if (op->lane == NO_LANE) transport_->accept(std::move(op));
        else lanes_[op->lane].push_back(std::move(op));
    }
    inbox_.clear();
    incoming_.store(false, std::memory_order_relaxed);
}

void Engine::finish(Op& op, uint32_t state) {
    if (op.quiet) quiet_--;
    under_way_--;
    op.state.store(state, std::memory_order_release);
    stir();
}

bool Engine::pump() {
    take_in();
    bool moved = false;
    for (int lane = NUM_LANES - 1; lane >= 0; lane--) {
        auto& queue = lanes_[lane];
        while (!queue.empty() && !failed()) {
            bool stepped = queue.front()->step();
            moved |= stepped;
            if (!queue.front()->over) {
                if (stepped) return true;  // back to the most urgent
                break;
            }
            std::shared_ptr<Op> op = std::move(queue.front());
            queue.pop_front();
            finish(*op, MET);
            take_in();
        }
    }
    return serve() || moved;
}

bool Engine::serve() {
    if (failed() || transport_->num_served() == 0) return false;  // after a failure nothing is moved any more: whoever drives loses it all
    std::vector<std::shared_ptr<Op>> finished;
    bool moved = transport_->serve(finished);
    for (auto& op : finished) finish(*op, MET);
    return moved;
}

size_t Engine::num_under_way() const {
    size_t num = transport_->num_served();
    for (auto& lane : lanes_) num += lane.size();
    return num;
}

std::vector<int> Engine::behind() const {
    std::vector<int> all = transport_->served_behind();
    for (auto& lane : lanes_)
        if (!lane.empty())
            for (int rank : lane.front()->behind()) all.push_back(rank);
    return all;
}

void Engine::drive(Op* op, int64_t deadline_ns) {
    // Whoever waits has nothing better to do than to look; the engine's thread would take a core from those who compute.
    const int64_t spin = op == nullptr ? std::min<int64_t>(spin_ns, 2000) : spin_ns;
    const int64_t yield = op == nullptr ? std::min<int64_t>(yield_ns, 20000) : yield_ns;
    int64_t idle_since = 0, looked = 0;
    uint32_t turns = 0;
    while (op == nullptr ? loud() && waiting_.load(std::memory_order_relaxed) == 0 : !done(*op)) {
        if (failed()) return lose_all();
        if (pump()) {
            idle_since = 0;
            continue;
        }
        cpu_pause();
        if (++turns % 16 != 0) continue;
        int64_t now = now_ns();
        if (idle_since == 0) idle_since = looked = now;
        if (now >= deadline_ns || (op == nullptr && closing_)) return;
        if (now - idle_since < spin) continue;
        if (now - idle_since < spin + yield) {
            sched_yield();
            turns = 15;
            continue;
        }
        transport_->arm();
        bool wanted = op == nullptr && waiting_.load() > 0;  // said before the wake-up that this rest would miss
        if (!pump() && !failed() && !wanted) transport_->rest(std::min(REST_NS, deadline_ns - now));
        transport_->disarm();
        turns = 15;
        if (now - looked >= LOOK_NS) {
            Failure found;
            looked = now;
            // What a peer did before it left or died is there by now, and may be all that was missing: only if nothing moves it is lost.
            if (transport_->trouble(behind(), found) && !pump()) fail(std::move(found));
        }
    }
}

void Engine::fail(Failure failure) {
    {
        std::lock_guard hold(failure_lock_);
        if (failed_.load()) return;
        failure_ = std::move(failure);
        transport_->tell(failure_);
        failed_.store(true, std::memory_order_release);
    }
    transport_->wake();  // whoever drives, or waits, loses what is under way
}

Failure Engine::failure() const {
    std::lock_guard hold(failure_lock_);
    return failure_;
}

void Engine::lose_all() {
    take_in();
    for (auto& lane : lanes_) {
        for (auto& op : lane) finish(*op, LOST);
        lane.clear();
    }
    for (auto& op : transport_->drop()) finish(*op, LOST);
}

void Engine::call_thread() {
    std::lock_guard hold(call_lock_);
    if (closing_) return;
    call_ = true;
    if (!thread_.joinable()) thread_ = std::thread([this] { run(); });
    called_.notify_one();
}

void Engine::run() {
    int64_t nap = 0;
    while (true) {
        bool called = doze(nap);
        if (closing_) return;
        if (!called && under_way_.load() == 0) continue;
        if (called || loud()) nap = DOZE_NS;
        if (waiting_.load() > 0) continue;  // whoever waits drives, and calls again if something is left
        if (!loud()) {  // one look, so that a full ring does not hold up its sender for long
            if (driving_.try_lock()) {
                pump();
                let_go();
            }
            continue;
        }
        driving_.lock();
        drive(nullptr, INT64_MAX);
        let_go();
        if (loud() && waiting_.load() == 0) call_thread();
    }
}

bool Engine::doze(int64_t& ns) {
    std::unique_lock hold(call_lock_);
    auto called = [this] { return call_ || closing_; };
    if (ns >= LONGEST_DOZE_NS) {
        dozing_.store(false);
        ns = under_way_.load() > 0 ? DOZE_NS : 0;  // who saw it dozing a moment ago called nobody
    }
    if (ns == 0) {
        called_.wait(hold, called);
    } else {
        dozing_.store(true);
        called_.wait_for(hold, std::chrono::nanoseconds(ns), called);
        ns *= 2;
    }
    bool was = call_;
    call_ = false;
    return was;
}

void Engine::after_fork() {
    closing_ = true;
    if (thread_.joinable()) thread_.detach();
    failed_.store(true, std::memory_order_release);
}

void Engine::close() {
    {
        std::lock_guard hold(call_lock_);
        if (closing_) return;
        closing_ = true;
    }
    if (under_way_ > 0) fail({{}, "closed while operations were under way", "closed"});
    called_.notify_all();
    transport_->wake();
    if (thread_.joinable()) thread_.join();
    if (!failed()) {
        transport_->leave();
        std::lock_guard hold(failure_lock_);
        failure_ = {{}, "this group is closed", "closed"};
        failed_.store(true, std::memory_order_release);
    }
}

}  // namespace echelon
