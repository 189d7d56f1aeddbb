#include "tcp.h"

#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>

namespace echelon {

namespace {

constexpr int64_t JUDGE_NS = 300'000'000;       // a data stream has ended: so long its control stream may say why
constexpr int MAX_IOV = 16;

void set(int fd, int level, int option, int value) { setsockopt(fd, level, option, &value, sizeof value); }

}  // namespace

Tcp::Tcp(int rank, const std::vector<std::vector<int>>& streams, Options options)
    : rank(rank), size(int(streams.size())), options_(options), links_(streams.size()) {
    epoll_ = epoll_create1(EPOLL_CLOEXEC);
    bell_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (epoll_ < 0 || bell_ < 0) throw Error(std::string("cannot watch connections: ") + strerror(errno));
    epoll_event bell{};
    bell.events = EPOLLIN | EPOLLET;
    bell.data.u64 = UINT64_MAX;
    epoll_ctl(epoll_, EPOLL_CTL_ADD, bell_, &bell);
    for (int peer = 0; peer < size; peer++) {
        const auto& fds = streams[peer];
        if (peer == rank) continue;
        if (fds.size() < FIRST_LANE + NUM_LANES || (fds.size() - FIRST_LANE) % NUM_LANES != 0)
            throw Error(std::to_string(fds.size()) + " connections to " + name(peer) + " cannot be dealt to the lanes");
        per_lane_ = int(fds.size() - FIRST_LANE) / NUM_LANES;
        links_[peer].streams.resize(fds.size());
        for (size_t i = 0; i < fds.size(); i++) {
            Stream& stream = links_[peer].streams[i];
            stream.fd = fds[i];
            stream.peer = peer;
            stream.kind = i < FIRST_LANE ? int(i) : FIRST_LANE + int(i - FIRST_LANE) / per_lane_;
            stream.ahead.resize(AHEAD_BYTES);
            watch(stream);
        }
    }
}

Tcp::~Tcp() {
    leave();
    for (auto& link : links_)
        for (auto& stream : link.streams)
            if (stream.fd >= 0) close(stream.fd);
    if (epoll_ >= 0) close(epoll_);
    if (bell_ >= 0) close(bell_);
}

void Tcp::watch(Stream& stream) {
    fcntl(stream.fd, F_SETFL, fcntl(stream.fd, F_GETFL) | O_NONBLOCK);
    set(stream.fd, IPPROTO_TCP, TCP_NODELAY, 1);
    const std::string& control = options_.congestion;  // where it is not allowed, the system's stays
    if (!control.empty()) setsockopt(stream.fd, IPPROTO_TCP, TCP_CONGESTION, control.data(), socklen_t(control.size()));
    if (stream.kind == CONTROL) {  // probes begin after a quarter of the limit, and the kernel gives up at the limit
        int limit_ms = std::max(2000, int(options_.limit_s * 1000));
        set(stream.fd, SOL_SOCKET, SO_KEEPALIVE, 1);
        set(stream.fd, IPPROTO_TCP, TCP_KEEPIDLE, std::max(1, limit_ms / 4000));
        set(stream.fd, IPPROTO_TCP, TCP_KEEPINTVL, std::max(1, limit_ms / 10000));
        set(stream.fd, IPPROTO_TCP, TCP_USER_TIMEOUT, limit_ms - 500);
    }
    epoll_event event{};
    event.events = EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET;
    event.data.u64 = uint64_t(stream.peer) << 32 | uint64_t(&stream - links_[stream.peer].streams.data());
    if (epoll_ctl(epoll_, EPOLL_CTL_ADD, stream.fd, &event) != 0)
        throw Error("cannot watch a connection to " + name(stream.peer) + ": " + strerror(errno));
}

void Tcp::after_fork() {
    gone_ = true;
    for (auto& link : links_)
        for (auto& stream : link.streams) {
            if (stream.fd >= 0) close(stream.fd);
            stream.fd = -1;
        }
    close(epoll_);
    close(bell_);
    epoll_ = bell_ = -1;
}

// --- what the kernel says ----------------------------------------------------------------------------------------

void Tcp::note(int timeout_ms) {
    epoll_event events[64];
    int num = epoll_wait(epoll_, events, 64, timeout_ms);
    for (int i = 0; i < num; i++) {
        if (events[i].data.u64 == UINT64_MAX) {
            uint64_t rung;
            if (::read(bell_, &rung, sizeof rung) < 0) continue;
            continue;
        }
        Stream& stream = links_[events[i].data.u64 >> 32].streams[events[i].data.u64 & UINT32_MAX];
        if (events[i].events & (EPOLLIN | EPOLLRDHUP | EPOLLHUP | EPOLLERR)) stream.readable = true;
        if (events[i].events & (EPOLLRDHUP | EPOLLHUP | EPOLLERR)) stream.hung_up = true;
        if (events[i].events & (EPOLLOUT | EPOLLHUP | EPOLLERR)) stream.writable = true;
    }
}

void Tcp::rest(int64_t ns) { note(int(std::clamp<int64_t>((ns + 999999) / 1000000, 0, 1000))); }

void Tcp::wake() {
    uint64_t one = 1;
    if (::write(bell_, &one, sizeof one) < 0) return;  // full: it rings already
}

bool Tcp::progress() {
    bool moved = false;
    note(0);
    for (auto& link : links_) {
        if (link.streams.empty()) continue;
        moved |= write_control(link);
        moved |= read(link, link.streams[CONTROL]);  // first: it says why the others end
        if (engine->failed()) return true;
    }
    for (auto& link : links_) {
        for (size_t i = MESSAGES; i < link.streams.size(); i++) {
            Stream& stream = link.streams[i];
            moved |= read(link, stream);
            if (!stream.queue.empty() && stream.writable) moved |= write(stream);
            if (engine->failed()) return true;
        }
        if (link.closed && !link.left) {
            int peer = link.streams[CONTROL].peer;
            engine->fail({{peer}, "the connection to " + name(peer) + " is gone: " + link.why, link.cause});
            return true;
        }
    }
    return moved;
}

void Tcp::ended(Link& link, Stream& stream, const std::string& why) {
    if (stream.ended) return;
    stream.ended = true;
    stream.readable = stream.writable = false;
    if (stream.kind == CONTROL) {
        link.closed = true;
        link.why = why;
    } else if (link.ended_ns == 0) {
        link.ended_ns = now_ns();
        if (link.why.empty()) link.why = why;
    }
}

// --- writing -----------------------------------------------------------------------------------------------------

Head Tcp::head(What what) const {
    Head head{};
    head.magic = MAGIC;
    head.what = uint8_t(what);
    head.term = options_.term;
    return head;
}

void Tcp::send(int peer, const Head& head, const char* payload, uint32_t* unsent) {
    auto& streams = links_[peer].streams;
    size_t which = MESSAGES;
    if (What(head.what) == What::data) {  // long parts are dealt over the lane's streams, chunk by chunk
        uint64_t turn = head.bytes == 0 ? 0 : head.offset / head.bytes;
        which = size_t(FIRST_LANE + head.lane * per_lane_) + turn % uint64_t(per_lane_);
    }
    ++*unsent;
    streams[which].queue.push_back({head, payload, 0, unsent});
}

bool Tcp::write(Stream& stream) {
    uint64_t written = 0;
    while (!stream.queue.empty() && written < BUDGET_BYTES) {
        iovec parts[MAX_IOV];
        int num_parts = 0;
        for (auto& out : stream.queue) {
            if (num_parts + 2 > MAX_IOV) break;
            if (out.done < sizeof(Head)) parts[num_parts++] = {reinterpret_cast<char*>(&out.head) + out.done, sizeof(Head) - out.done};
            uint64_t from = out.done > sizeof(Head) ? out.done - sizeof(Head) : 0;
            if (from < out.head.bytes) parts[num_parts++] = {const_cast<char*>(out.payload) + from, size_t(out.head.bytes - from)};
        }
        msghdr message{};
        message.msg_iov = parts;
        message.msg_iovlen = size_t(num_parts);
        ssize_t num = sendmsg(stream.fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (num < 0) {
            if (errno == EINTR) continue;
            stream.writable = false;
            if (errno != EAGAIN) stream.readable = stream.hung_up = true;  // reading tells why
            break;
        }
        written += uint64_t(num);
        for (uint64_t left = uint64_t(num); left > 0;) {
            Outgoing& out = stream.queue.front();
            uint64_t piece = std::min(left, sizeof(Head) + out.head.bytes - out.done);
            out.done += piece;
            left -= piece;
            if (out.done < sizeof(Head) + out.head.bytes) break;
            --*out.unsent;
            stream.queue.pop_front();
        }
    }
    return written > 0;
}

void Tcp::say(int peer, const Head& head, const void* payload) {
    Link& link = links_[peer];
    std::lock_guard hold(control_lock_);
    if (gone_ || link.streams.empty()) return;
    link.control.append(reinterpret_cast<const char*>(&head), sizeof head);
    if (head.bytes > 0) link.control.append(static_cast<const char*>(payload), head.bytes);
    ssize_t num = ::send(link.streams[CONTROL].fd, link.control.data(), link.control.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
    if (num > 0) link.control.erase(0, size_t(num));
}

bool Tcp::write_control(Link& link) {
    std::lock_guard hold(control_lock_);
    if (link.control.empty() || gone_) return false;
    ssize_t num = ::send(link.streams[CONTROL].fd, link.control.data(), link.control.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
    if (num > 0) link.control.erase(0, size_t(num));
    return num > 0;
}

void Tcp::knock(int peer) { say(peer, head(What::knock)); }

// --- ends --------------------------------------------------------------------------------------------------------

bool Tcp::trouble(const std::vector<int>& behind, Failure& failure) {
    for (int peer = 0; peer < size; peer++) {
        Link& link = links_[peer];
        if (link.streams.empty()) continue;
        bool waited = std::find(behind.begin(), behind.end(), peer) != behind.end(), all_ended = true;
        for (size_t i = MESSAGES; i < link.streams.size(); i++) all_ended &= link.streams[i].ended;
        if (link.left ? waited && all_ended : link.ended_ns != 0 && now_ns() - link.ended_ns > JUDGE_NS) {
            failure.peers.push_back(peer);
            failure.reason = link.left ? name(peer) + " has left" : "the connection to " + name(peer) + " is gone: " + link.why;
            failure.cause = link.left ? "left" : link.cause;
        }
    }
    return !failure.peers.empty();
}

void Tcp::tell(const Failure& failure) {
    std::string words;
    auto add = [&](int32_t number) { words.append(reinterpret_cast<char*>(&number), sizeof number); };
    size_t num = std::min<size_t>(failure.peers.size(), 64);
    add(int32_t(num));
    for (size_t i = 0; i < num; i++) add(failure.peers[i]);
    words += failure.reason.substr(0, MAX_WORDS - words.size());
    Head told = head(What::failure);
    told.bytes = words.size();
    for (int peer = 0; peer < size; peer++) say(peer, told, words.data());
}

void Tcp::leave() {
    if (gone_) return;
    for (int peer = 0; peer < size; peer++) {
        Link& link = links_[peer];
        if (link.streams.empty()) continue;
        if (engine == nullptr || !engine->failed()) say(peer, head(What::leave));
        for (auto& stream : link.streams) shutdown(stream.fd, SHUT_WR);
    }
    gone_ = true;
}

// --- scratch -----------------------------------------------------------------------------------------------------

std::unique_ptr<char[]> Tcp::borrow(uint64_t bytes, uint64_t& capacity) {
    for (auto it = spare_.begin(); it != spare_.end(); ++it) {
        if (it->second < bytes) continue;
        auto found = std::move(it->first);
        capacity = it->second;
        spare_.erase(it);
        return found;
    }
    capacity = bytes;
    return std::unique_ptr<char[]>(new char[bytes]);
}

void Tcp::give_back(std::unique_ptr<char[]> scratch, uint64_t capacity) {
    if (spare_.size() >= 4) spare_.erase(spare_.begin());
    spare_.emplace_back(std::move(scratch), capacity);
}

}  // namespace echelon
