#include "hier.h"

#include <algorithm>

namespace echelon {

Hier::Hier(std::unique_ptr<Tcp> tcp_, std::unique_ptr<Shm> shm_, std::vector<std::vector<int>> hosts_)
    : hosts(std::move(hosts_)), tcp(std::move(tcp_)), shm(std::move(shm_)) {
    int next = 0, most = 0;
    bool in_order = true;
    columns = tcp->size;
    for (size_t h = 0; h < hosts.size(); h++) {
        columns = std::min(columns, int(hosts[h].size()));
        most = std::max(most, int(hosts[h].size()));
        for (size_t i = 0; i < hosts[h].size(); i++) {
            in_order &= hosts[h][i] == next++;
            if (hosts[h][i] != tcp->rank) continue;
            host = int(h);
            local = int(i);
        }
    }
    even = in_order && columns == most;
    if (next != tcp->size || int(hosts[size_t(host)].size()) != shm->size || shm->rank != local)
        throw Error("the hosts do not hold the ranks of this group");
    shm->names = hosts[size_t(host)];
    shm->on_knock = [this](int peer) { tcp->knock(hosts[size_t(host)][size_t(peer)]); };
}

void Hier::belongs_to(Engine* owner) { engine = tcp->engine = shm->engine = owner; }

void Hier::leave() {
    tcp->leave();
    shm->leave();
}

// --- messages ----------------------------------------------------------------------------------------------------

void Hier::accept(std::shared_ptr<Op> op) {
    auto message = std::static_pointer_cast<Message>(op);
    const bool near = message->peer >= 0 && shm->number(message->peer) >= 0;
    if (!near) tcp->accept(op);  // which may have kept one for it
    if (near || (message->peer < 0 && !message->claimed)) shm->accept(std::move(op));
}

// TCP first: when it says that a rank has left, all that this rank wrote into shared memory is there.
bool Hier::serve(std::vector<std::shared_ptr<Op>>& finished) {
    bool moved = tcp->serve(finished);
    if (engine->failed()) return true;
    if (shm->num_served() > 0) moved |= shm->serve(finished);
    tcp->forget_claimed();
    return moved;
}

std::vector<std::shared_ptr<Op>> Hier::drop() {
    tcp->forget_claimed();
    shm->forget_claimed();
    std::vector<std::shared_ptr<Op>> all = tcp->drop();
    for (auto& op : shm->drop())
        if (std::find(all.begin(), all.end(), op) == all.end()) all.push_back(std::move(op));
    return all;
}

std::vector<int> Hier::served_behind() const {
    std::vector<int> ranks = tcp->served_behind();
    for (int rank : shm->served_behind()) ranks.push_back(rank);
    return ranks;
}

Team Hier::team(int column) const {
    Team team;
    for (auto& ranks : hosts) team.ranks.push_back(ranks[size_t(column)]);
    team.me = host;
    return team;
}

HierCollective::HierCollective(Engine& engine, Hier& hier, Request request)
    : engine(engine), hier(hier), request(std::move(request)), element(size_of(this->request.dtype)), said(call_of(this->request)) {
    lane = this->request.lane;
    small = bytes() <= LITTLE_BYTES;
}

HierCollective::~HierCollective() {
    if (task.handle) task.handle.destroy();
}

bool HierCollective::handles(const Hier& hier, const Request& request) {
    switch (request.kind) {
        case Kind::barrier: return true;
        case Kind::all_reduce: return hier.even || request.op != RedOp::avg;  // an average of averages needs equal hosts
        case Kind::reduce_scatter:
        case Kind::all_gather: return hier.even;
        case Kind::broadcast:
            for (auto& ranks : hier.hosts)
                for (int c = 0; c < hier.columns; c++)
                    if (ranks[size_t(c)] == request.root) return true;
            return false;
        default: return false;
    }
}

std::string HierCollective::what() const { return describe(said); }

std::vector<int> HierCollective::behind() const {
    std::vector<int> ranks;
    if (near_ && !near_->over)
        for (int peer : near_->behind()) ranks.push_back(hier.hosts[size_t(hier.host)][size_t(peer)]);
    for (auto& op : far_)
        if (op && !op->over)
            for (int rank : op->behind()) ranks.push_back(rank);
    return ranks;
}

bool HierCollective::step() {
    moved = false;
    if (!task.handle) {
        hier.tcp->about_to[lane] = &said;
        task = run();
    }
    bool reads = true;
    for (auto& op : far_) {
        if (op == nullptr || op->over) continue;
        moved |= op->step();
        reads = false;
    }
    if (reads) moved |= hier.tcp->progress();  // the others may have given up
    if (near_ && !near_->over) moved |= near_->step();
    if (engine.failed()) return true;
    task.handle.resume();
    if (!task.handle.done()) return moved;
    if (!task.handle.promise().error.empty()) engine.fail({{}, task.handle.promise().error, "broken"});
    else over = true;
    if (scratch) hier.tcp->give_back(std::move(scratch), capacity);
    return true;
}

// --- parts -------------------------------------------------------------------------------------------------------

void HierCollective::near(Kind kind, int root, uint64_t count, char* x, char* out) {
    Request part;
    part.kind = kind;
    part.dtype = request.dtype;
    part.op = request.op;
    part.root = root;
    part.count = count;
    part.x = x;
    part.out = out;
    part.lane = lane;
    part.whole = said;
    near_ = std::make_unique<Collective>(engine, *hier.shm, std::move(part));
    near_->step();
    moved = true;
}

bool HierCollective::near_over() { return near_->over; }

void HierCollective::far(Kind kind, int column, int root, uint64_t count, char* x, char* out) {
    moved = true;
    hier.tcp->about_to[lane] = nullptr;
    if (!hier.owns(column)) {
        hier.tcp->next_number[lane]++;  // numbers are one sequence for all ranks
        far_.push_back(nullptr);
        return;
    }
    Request part;
    part.kind = kind;
    part.dtype = request.dtype;
    part.op = request.op;
    part.root = root;
    part.count = count;
    part.x = x;
    part.out = out;
    part.lane = lane;
    part.whole = said;
    far_.push_back(std::make_unique<TcpCollective>(engine, *hier.tcp, hier.team(column), std::move(part)));
    far_.back()->step();
}

bool HierCollective::far_over(size_t left) {
    while (!far_.empty() && (far_.front() == nullptr || far_.front()->over)) far_.pop_front();
    return far_.size() <= left;
}

char* HierCollective::borrow(uint64_t bytes) {
    scratch = hier.tcp->borrow(std::max<uint64_t>(bytes, 1), capacity);
    return scratch.get();
}

// The data in pieces that are cut into columns of equal length; what is left over is less than one element a column.
std::vector<HierCollective::Piece> HierCollective::pieces() const {
    std::vector<Piece> all;
    const uint64_t columns = uint64_t(hier.columns), most = std::max<uint64_t>(1, PIECE_BYTES / element / columns / 16 * 16);
    const uint64_t whole = request.count / columns;
    for (uint64_t begin = 0; begin < whole; begin += most) all.push_back({x(begin * columns), std::min(most, whole - begin)});
    return all;
}

// --- operations --------------------------------------------------------------------------------------------------

Task HierCollective::run() {
    switch (request.kind) {
        case Kind::all_reduce: return bytes() <= LITTLE_BYTES || request.count < uint64_t(hier.columns) ? little() : all_reduce();
        case Kind::broadcast: return broadcast();
        case Kind::all_gather: return all_gather();
        case Kind::reduce_scatter: return reduce_scatter();
        default: return little();
    }
}

// all_reduce of little, barrier: the first rank of each host speaks for it.
Task HierCollective::little() {
    const bool barrier = request.kind == Kind::barrier;
    near(barrier ? Kind::barrier : Kind::reduce, 0, request.count, x(), nullptr);
    while (!near_over()) co_await std::suspend_always{};
    far(barrier ? Kind::barrier : Kind::all_reduce, 0, 0, request.count, x(), nullptr);
    while (!far_over(0)) co_await std::suspend_always{};
    near(barrier ? Kind::barrier : Kind::broadcast, 0, request.count, x(), nullptr);
    while (!near_over()) co_await std::suspend_always{};
}

// Piece by piece: the next one is added up on this host while the last one meets the other hosts.
Task HierCollective::all_reduce() {
    const std::vector<Piece> all = pieces();
    const uint64_t num = all.size(), width = element;
    const int columns = hier.columns;
    for (uint64_t k = 0; k <= num; k++) {
        if (k < num) {
            const Piece piece = all[k];
            if (hier.even) {
                near(Kind::reduce_scatter, 0, piece.count, piece.at, piece.at + uint64_t(hier.local) * piece.count * width);
                while (!near_over()) co_await std::suspend_always{};
            }
            for (int c = 0; c < columns && !hier.even; c++) {
                near(Kind::reduce, c, piece.count, piece.at + uint64_t(c) * piece.count * width, nullptr);
                while (!near_over()) co_await std::suspend_always{};
            }
            const int mine = hier.local < columns ? hier.local : 0;  // without a column of its own a rank only counts
            far(Kind::all_reduce, mine, 0, piece.count, piece.at + uint64_t(mine) * piece.count * width, nullptr);
        }
        if (k == 0) continue;
        while (!far_over(k < num ? 1 : 0)) co_await std::suspend_always{};
        const Piece piece = all[k - 1];
        if (hier.even) {
            near(Kind::all_gather, 0, piece.count, piece.at + uint64_t(hier.local) * piece.count * width, piece.at);
            while (!near_over()) co_await std::suspend_always{};
        }
        for (int c = 0; c < columns && !hier.even; c++) {
            near(Kind::broadcast, c, piece.count, piece.at + uint64_t(c) * piece.count * width, nullptr);
            while (!near_over()) co_await std::suspend_always{};
        }
    }
    const uint64_t rest = request.count % uint64_t(columns), begin = request.count - rest;
    if (rest == 0) co_return;
    near(Kind::reduce, 0, rest, x(begin), nullptr);
    while (!near_over()) co_await std::suspend_always{};
    far(Kind::all_reduce, 0, 0, rest, x(begin), nullptr);
    while (!far_over(0)) co_await std::suspend_always{};
    near(Kind::broadcast, 0, rest, x(begin), nullptr);
    while (!near_over()) co_await std::suspend_always{};
}

// Along the root's column to every host, and there to everybody, piece by piece.
Task HierCollective::broadcast() {
    int host = 0, column = 0;
    for (size_t h = 0; h < hier.hosts.size(); h++)
        for (int c = 0; c < hier.columns; c++)
            if (hier.hosts[h][size_t(c)] == request.root) host = int(h), column = c;
    const uint64_t per = PIECE_BYTES / element, num = std::max<uint64_t>(1, (request.count + per - 1) / per);
    for (uint64_t k = 0; k <= num; k++) {
        if (k < num) far(Kind::broadcast, column, host, std::min(per, request.count - k * per), x(k * per), nullptr);
        if (k == 0) continue;
        while (!far_over(k < num ? 1 : 0)) co_await std::suspend_always{};
        near(Kind::broadcast, column, std::min(per, request.count - (k - 1) * per), x((k - 1) * per), nullptr);
        while (!near_over()) co_await std::suspend_always{};
    }
}

// My column's parts of all hosts come here, and go to my neighbours host by host.
Task HierCollective::all_gather() {
    const uint64_t num_hosts = hier.hosts.size(), count = request.count;
    char* parts = borrow(num_hosts * bytes());
    far(Kind::all_gather, hier.local, 0, count, x(), parts);
    while (!far_over(0)) co_await std::suspend_always{};
    for (uint64_t h = 0; h < num_hosts; h++) {
        near(Kind::all_gather, 0, count, parts + h * bytes(), out(h * uint64_t(hier.columns) * count));
        while (!near_over()) co_await std::suspend_always{};
    }
}

// What my host has for the ranks of my column is added up here, host by host; then the column meets.
Task HierCollective::reduce_scatter() {
    const uint64_t num_hosts = hier.hosts.size(), count = request.count;
    char* parts = borrow(num_hosts * bytes());
    for (uint64_t h = 0; h < num_hosts; h++) {
        near(Kind::reduce_scatter, 0, count, x(h * uint64_t(hier.columns) * count), parts + h * bytes());
        while (!near_over()) co_await std::suspend_always{};
    }
    far(Kind::reduce_scatter, hier.local, 0, count, parts, out());
    while (!far_over(0)) co_await std::suspend_always{};
}

}  // namespace echelon
