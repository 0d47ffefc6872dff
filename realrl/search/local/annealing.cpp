// Chains of annealing: realrl/search/local/anneal.py in C++, with the fast model and the bytes of devices that it needs.
//
// A chain stops at what only Python knows, such as the cost of a move, and goes on with the same proposal once it is
// told. Sums are made in the order of the Python, and must be compiled without contraction or reordering.

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <map>
#include <tuple>
#include <unordered_map>
#include <vector>

namespace {

using i64 = std::int64_t;
using u64 = std::uint64_t;
constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr int kMostCalls = 20;  // two ends of each mesh, and its last ranks, have a bit each
constexpr i64 kNone = std::numeric_limits<i64>::min();
constexpr std::size_t kMostKept = std::size_t{1} << 23;  // numbers of bytes that are kept, of calls whose parameters come
constexpr double kNearBest = 1.03;                        // times the least period: of plans that are kept beside the best
constexpr std::size_t kMostApart = 512;                  // of which there are at most so many
constexpr i64 kMostInNode = 64;                          // devices of a node whose peers are counted, as in links.py
constexpr int kSince = 2, kUntil = 4;                    // steps between whose ends a period is measured
constexpr int kSharingRounds = 2;                        // as many as fast.py has

enum Code : i64 { kUnderWay, kOver, kBetter, kAsksDevices, kAsksArriving, kAsksMove, kAsksLinks, kAsksOrdered };

using Key = std::array<i64, 5>;
struct HashOfKey {
    std::size_t operator()(const Key& key) const {
        u64 h = 0x9E3779B97F4A7C15ull;
        for (i64 one : key) h = (h ^ static_cast<u64>(one)) * 0xBF58476D1CE4E5B9ull, h ^= h >> 29;
        return h;
    }
};
template <class Value>
using Table = std::unordered_map<Key, Value, HashOfKey>;

struct Missing {  // what Python has to tell
    Code code;
    Key key;
};

struct Random {  // SplitMix64
    u64 state = 0;
    u64 next() {
        u64 z = state += 0x9E3779B97F4A7C15ull;
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
        z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
        return z ^ (z >> 31);
    }
    double unit() { return static_cast<double>(next() >> 11) * 0x1p-53; }
    int below(std::size_t n) { return static_cast<int>((static_cast<unsigned __int128>(next()) * n) >> 64); }
    template <class Values>
    const auto& of(const Values& values) { return values[below(values.size())]; }
    template <class Values>
    void shuffle(Values& values, std::size_t n) {  // the first n become a sample
        for (std::size_t i = 0; i < n; ++i) std::swap(values[i], values[i + below(values.size() - i)]);
    }
};

struct Choice {
    i64 n_devices, strategy, is_gathered, n_split;
    double seconds, least;  // the latter while all other devices of its nodes wait
    bool is_known = false;
    std::vector<i64> kept{}, used{}, begun{};
};

struct Placed {
    i64 first = 0;
    int choice = 0;
};
using Plan = std::vector<Placed>;
using Calls = std::vector<int>;

struct Move {
    int owner, source, target;
    bool is_after;
};
struct Cycle {
    double lag;
    u64 calls, between;
};
struct Wait {
    int other;
    i64 lag;
};
struct Lead {
    int reader;
    i64 steps;
    bool is_sent;
};
struct Ring {
    i64 stride, n, phase, first, end;
    bool is_like(const Ring& other) const { return stride == other.stride && n == other.n && phase == other.phase; }
    bool operator<(const Ring& o) const {
        return std::tie(stride, n, phase, first, end) < std::tie(o.stride, o.n, o.phase, o.first, o.end);
    }
};
struct Messages {
    Ring ring;
    std::vector<i64> counts;
};
struct Links {
    std::vector<Ring> rings;
    std::vector<Messages> messages;
    i64 first = 0;
    std::vector<u64> peers;
};

template <class Do>
void each(u64 bits, Do act) {
    for (; bits; bits &= bits - 1) act(__builtin_ctzll(bits));
}

double most_of(const double* seconds, int n) {  // which are not negative
    double most = 0.0;
    for (int i = 0; i < n; ++i) most = std::max(most, seconds[i]);
    return most;
}

class Reader {
  public:
    explicit Reader(const i64* at) : at_(at) {}
    i64 one() { return *at_++; }
    template <class Value = i64>
    std::vector<Value> some(i64 n) {
        std::vector<Value> found(at_, at_ + n);
        at_ += n;
        return found;
    }

  private:
    const i64* at_;
};

// The calls of a few steps, started as the master starts them: `_Run` of realrl/search/fast.py.
struct Part {
    double before = 0.0, run = 0.0, after = 0.0;
    u64 begin = 0, mesh = 0, finish = 0;                   // segments
    u64 begin_bits = 0, mesh_bits = 0, late_bits = 0;      // with those of last ranks
    bool has_before = false, has_after = false;
};

struct Flow {
    int n_calls;
    i64 ahead;
    bool has_leads = false;
    std::vector<std::vector<Wait>> waits;
    std::vector<std::vector<Lead>> leads;
    std::vector<u64> followers, readers, before;
    std::vector<int> homes, sources;
    std::vector<Move> moves;
    std::vector<Cycle> cycles;
};

struct Bar {  // a call that computes
    int call;
    double start, end;
};

class Run {
  public:
    // Bars are kept in `bars`, if there is one.
    Run(const Flow& flow, const Part* parts, std::vector<Bar>* bars = nullptr)
        : flow_(flow), parts_(parts), all_((u64{1} << flow.n_calls) - 1), bars_(bars) {
        last_ = kUntil + 1 + flow.ahead;
        doubtful_ = all_;
        if (bars_) bars_->clear();
    }

    double period() {
        while (oldest_ <= kUntil) {
            start_calls();
            if (!under_way_) return kInf;
            finish_next();
        }
        if (bars_) keep_measured();
        return (ends_[kUntil] - ends_[kSince]) / (kUntil - kSince);
    }

  private:
    struct Entry {
        i64 step;
        bool is_plain;
        int call;
        bool operator<(const Entry& o) const {
            return std::tie(step, is_plain, call) < std::tie(o.step, o.is_plain, o.call);
        }
    };

    void keep_measured() {
        const double first = ends_[kSince], last = ends_[kUntil];
        std::size_t n = 0;
        for (const Bar& bar : *bars_) {
            if (bar.start < last && first < bar.end) {
                (*bars_)[n++] = {bar.call, std::max(bar.start, first), std::min(bar.end, last)};
            }
        }
        bars_->resize(n);
    }

    void start_calls() {
        do {
            each(doubtful_, [&](int call) {
                if (known_ >> call & 1 || !can_start(call)) return;
                known_ |= u64{1} << call;
                const Entry entry{sent_[call] + 1, parts_[call].begin_bits == parts_[call].mesh_bits, call};
                int at = n_ready_++;
                for (; at > 0 && entry < ready_[at - 1]; --at) ready_[at] = ready_[at - 1];
                ready_[at] = entry;
            });
            u64 held = 0;
            int n_waiting = 0, n_started = 0;
            int started[kMostCalls];
            for (int i = 0; i < n_ready_; ++i) {
                const Entry entry = ready_[i];
                const u64 begin = parts_[entry.call].begin_bits;
                const bool is_oldest = entry.step == oldest_;
                if (!(begin & (held | (is_oldest ? full_ : busy_)))) {
                    take(entry.call);
                    started[n_started++] = entry.call;
                } else {
                    ready_[n_waiting++] = entry;
                    if (is_oldest) held |= begin;
                }
            }
            n_ready_ = n_waiting;
            if (n_started) send(started, n_started);
            doubtful_ = n_started && flow_.has_leads ? all_ : 0;
        } while (doubtful_);
    }

    bool can_start(int call) const {
        const i64 step = sent_[call] + 1;
        if (done_[call] < step - 1 || step > std::min(oldest_ + flow_.ahead, last_)) return false;
        for (const Wait& wait : flow_.waits[call]) {
            if (done_[wait.other] >= step - wait.lag) continue;
            if (given_[wait.other] < step || !(flow_.readers[wait.other] >> call & 1)) return false;
        }
        for (const Lead& lead : flow_.leads[call]) {
            if ((lead.is_sent ? sent_ : done_)[lead.reader] < std::min(step + lead.steps, last_)) return false;
        }
        return true;
    }

    void take(int call) {
        const u64 mesh = parts_[call].mesh_bits;
        full_ |= busy_ & mesh;
        busy_ |= mesh;
        ++sent_[call];
        known_ &= ~(u64{1} << call);
    }

    void send(const int* calls, int n) {
        u64 taken = 0, late = 0;
        for (int i = 0; i < n; ++i) {
            const Part& part = parts_[calls[i]];
            if (taken & part.mesh_bits) {
                late |= u64{1} << calls[i];
            } else if (part.has_before) {
                meet(part);
            }
            taken |= part.mesh_bits;
        }
        for (int i = 0; i < n; ++i) {
            const int call = calls[i];
            const Part& part = parts_[call];
            if (part.has_before && late >> call & 1) meet(part);
            const double start = std::max(now_, most_free(part.mesh));
            double end = start + part.run;
            if (bars_) bars_->push_back({call, start, end});
            each(part.mesh, [&](int segment) { free_[segment] = end; });
            if (part.has_after) {
                end = most_free(part.finish) + part.after;
                each(part.finish, [&](int segment) { free_[segment] = end; });
            }
            end_[call] = end;
            under_way_ |= u64{1} << call;
        }
    }

    double most_free(u64 segments) const {
        double most = -kInf;
        each(segments, [&](int segment) { most = std::max(most, free_[segment]); });
        return most;
    }

    void meet(const Part& part) {
        const double end = std::max(now_, most_free(part.begin)) + part.before;
        each(part.begin, [&](int segment) { free_[segment] = end; });
    }

    void release(u64 bits) {
        busy_ &= ~(bits & ~full_);
        full_ &= ~bits;
    }

    void finish_next() {
        int call = -1;
        each(under_way_, [&](int one) {
            if (call < 0 || end_[one] < end_[call]) call = one;
        });
        under_way_ &= ~(u64{1} << call);
        now_ = end_[call];
        u64 mesh = parts_[call].mesh_bits;
        const u64 late = parts_[call].late_bits;
        ++given_[call];
        if (late && flow_.readers[call]) {
            release(mesh & ~late);
            doubtful_ |= flow_.readers[call];
            start_calls();
            mesh = late;
        }
        ++done_[call];
        release(mesh);
        doubtful_ |= flow_.followers[call];
        while (*std::min_element(done_.begin(), done_.begin() + flow_.n_calls) >= oldest_) {
            if (oldest_ <= kUntil) ends_[oldest_] = now_;
            ++oldest_;
            doubtful_ = all_;
        }
    }

    const Flow& flow_;
    const Part* parts_;
    const u64 all_;
    std::vector<Bar>* bars_;
    i64 oldest_ = 1, last_;
    double now_ = 0.0, ends_[kUntil + 1] = {}, free_[64] = {}, end_[kMostCalls] = {};
    u64 busy_ = 0, full_ = 0, known_ = 0, doubtful_ = 0, under_way_ = 0;
    std::array<i64, kMostCalls> done_{}, sent_{}, given_{};
    Entry ready_[kMostCalls];
    int n_ready_ = 0;
};

struct Kind {  // settings of a chain, as anneal.py has them
    bool passes;
    double groups, pairs, hot, cooled, apart, joining, lacking, filling, like_the_last;
};

class Annealing {
  public:
    Annealing(const i64* longs, const double* doubles) {
        Reader in(longs);
        flow_.n_calls = static_cast<int>(in.one());
        n_devices_ = in.one(), n_per_node_ = in.one(), flow_.ahead = in.one(), connects_ = in.one();
        node_peers_ = in.one() && n_per_node_ <= kMostInNode ? ~u64{0} >> (kMostInNode - n_per_node_) : 0;
        ring_bytes_ = in.one(), pair_bytes_ = in.one();
        const double* seconds = doubles;
        capacity_ = *seconds++, alone_ = *seconds++;
        for (int call = 0; call < flow_.n_calls; ++call) {
            flow_.homes.push_back(static_cast<int>(in.one()));
            flow_.sources.push_back(static_cast<int>(in.one()));
            fixed_.push_back(in.one());
            for (auto* masks : {&flow_.followers, &flow_.readers, &flow_.before}) masks->push_back(in.one());
            flow_.waits.emplace_back();
            for (i64 n = in.one(); n > 0; --n) {
                const i64 other = in.one();
                flow_.waits.back().push_back({static_cast<int>(other), in.one()});
            }
            flow_.leads.emplace_back();
            for (i64 n = in.one(); n > 0; --n) {
                const i64 reader = in.one(), steps = in.one();
                flow_.leads.back().push_back({static_cast<int>(reader), steps, in.one() != 0});
                flow_.has_leads = true;
            }
            read_choices(in, seconds);
        }
        for (i64 n = in.one(); n > 0; --n) {
            const auto one = in.some<int>(4);
            flow_.moves.push_back({one[0], one[1], one[2], one[3] != 0});
        }
        for (i64 n = in.one(); n > 0; --n) {
            const auto one = in.some(3);
            flow_.cycles.push_back({static_cast<double>(one[0]), static_cast<u64>(one[1]), static_cast<u64>(one[2])});
        }
        for (i64 n = in.one(); n > 0; --n) {
            roles_.emplace_back();
            each(in.one(), [&](int call) { roles_.back().push_back(call); });
        }
    }

    void begin(const i64* plan, const i64* settings, const double* shares) {
        plan_ = read(plan);
        n_proposals_ = settings[0], random_.state = static_cast<u64>(settings[1]);
        kind_ = {settings[2] != 0, shares[0], shares[1], shares[2], shares[3],
                 shares[4],        shares[5], shares[6], shares[7], shares[8]};
        number_ = 0, first_ = -1.0, stage_ = kNext;
        known_links_.clear(), lacking_.clear(), apart_.clear(), most_lacking_ = 0;
    }

    // Go on up to the next multiple of some proposals, or to what Python has to say.
    Code go(i64 n, i64* asked, double* period) {
        try {
            if (first_ < 0.0) first_ = score_ = least_ = period_of(plan_, true, kInf);
            for (const i64 until = std::min(n_proposals_, (number_ / n + 1) * n); number_ < until || stage_ != kNext;) {
                if (step()) {
                    write(proposal_, asked);
                    *period = period_;
                    return kBetter;
                }
            }
            return number_ >= n_proposals_ ? kOver : kUnderWay;
        } catch (const Missing& missing) {
            std::copy(missing.key.begin(), missing.key.end(), asked);
            return missing.code;
        }
    }

    // Say whether the better plan is accepted.
    void answer(bool is_accepted) { stage_ = is_accepted ? kAccepted : kRefused; }

    // Say by how many bytes a device with the same calls as one of a plan needs more than is counted.
    void lacks(const i64* plan, i64 device, i64 n_bytes) {
        if (n_bytes) lacking_[calls_on(read(plan), device)] = n_bytes, most_lacking_ = std::max(most_lacking_, n_bytes);
    }

    void give_devices(const i64* key, const i64* values) {
        Choice& choice = choices_[key[0]][key[1]];
        Reader in(values);
        const bool has_begun = in.one() != 0;
        choice.kept = in.some(choice.n_devices), choice.used = in.some(choice.n_devices);
        if (has_begun) choice.begun = in.some(choice.n_devices);
        choice.is_known = true;
    }

    void give_arriving(const i64* key, const i64* values, bool is_ordered) {
        const i64 n = choices_[key[0]][key[is_ordered ? 1 : 3]].n_devices;
        if ((n_kept_ += n) > kMostKept) arriving_.clear(), ordered_.clear(), n_kept_ = n;
        (is_ordered ? ordered_ : arriving_)[key_at(key)].assign(values, values + n);
    }

    void give_move(const i64* key, double seconds) { moves_[key_at(key)] = seconds; }

    void give_links(const i64* key, const i64* values) {
        Reader in(values);
        Links links;
        const auto ring = [&in] { const auto one = in.some(5); return Ring{one[0], one[1], one[2], one[3], one[4]}; };
        for (i64 n = in.one(); n > 0; --n) links.rings.push_back(ring());
        for (i64 n = in.one(); n > 0; --n) {
            const Ring one = ring();
            links.messages.push_back({one, in.some(one.end - one.first)});
        }
        links.first = in.one();
        const i64 n = in.one();
        links.peers = in.some<u64>(n);
        (key[3] == kNone ? plain_links_ : known_links_)[key_at(key)] = std::move(links);
    }

    // Write the best plans of the best arrangements of meshes, the quickest first; return their number.
    i64 apart(i64 most, i64* plans, double* periods) {
        drop_far();
        std::vector<const Known*> found;
        for (const auto& [key, known] : apart_) found.push_back(&known);
        std::sort(found.begin(), found.end(), [](auto* one, auto* other) {
            return std::tie(one->period, one->number) < std::tie(other->period, other->number);
        });
        if (static_cast<i64>(found.size()) > most) found.resize(most);
        for (const Known* known : found) {
            write(known->plan, plans);
            plans += 2 * flow_.n_calls;
            *periods++ = known->period;
        }
        return static_cast<i64>(found.size());
    }

    Code value(const i64* plan, bool is_bytes, double limit, i64* asked, double* found) {
        try {
            const Plan own = read(plan);
            *found = is_bytes ? static_cast<double>(likely(own, limit)) : period_of(own, true, limit);
            return kOver;
        } catch (const Missing& missing) {
            std::copy(missing.key.begin(), missing.key.end(), asked);
            return missing.code;
        }
    }

  private:
    struct Known {
        double period;
        i64 number;
        Plan plan;
    };

    struct Piece {
        i64 node;
        double n_devices;
        u64 calls;
    };

    enum Stage { kNext, kProposed, kAsked, kAccepted, kRefused };

    void read_choices(Reader& in, const double*& seconds) {
        const i64 n = in.one(), n_proposed = in.one();
        choices_.emplace_back(), of_size_.emplace_back(), sizes_.emplace_back(), alike_.emplace_back();
        std::map<i64, Calls> of_size;
        for (i64 i = 0; i < n; ++i) {
            const auto one = in.some(4);
            choices_.back().push_back({one[0], one[1], one[2], one[3], seconds[0], seconds[1]});
            seconds += 2;
            if (i < n_proposed) of_size[one[0]].push_back(i), alike_.back()[one[1]].push_back(i);
        }
        for (auto& [size, numbers] : of_size) sizes_.back().push_back(size), of_size_.back()[size] = numbers;
    }

    Plan read(const i64* plan) const {
        Plan found(flow_.n_calls);
        for (auto& placed : found) placed.first = *plan++, placed.choice = static_cast<int>(*plan++);
        return found;
    }
    void write(const Plan& plan, i64* into) const {
        for (const auto& placed : plan) *into++ = placed.first, *into++ = placed.choice;
    }
    static Key key_at(const i64* key) { return {key[0], key[1], key[2], key[3], key[4]}; }

    const Choice& choice_of(const Plan& plan, int call) const { return choices_[call][plan[call].choice]; }
    i64 end_of(const Plan& plan, int call) const { return plan[call].first + choice_of(plan, call).n_devices; }
    bool is_same_span(const Plan& plan, int one, int other) const {
        return plan[one].first == plan[other].first && end_of(plan, one) == end_of(plan, other);
    }
    bool is_same_place(const Plan& plan, int one, int other) const {
        return is_same_span(plan, one, other) && choice_of(plan, one).strategy == choice_of(plan, other).strategy;
    }

    // Add the ends of all meshes, in order and each of them once.
    void add_ends(const Plan& plan, std::vector<i64>& ends) const {
        for (int call = 0; call < flow_.n_calls; ++call) {
            ends.push_back(plan[call].first), ends.push_back(end_of(plan, call));
        }
        std::sort(ends.begin(), ends.end());
        ends.erase(std::unique(ends.begin(), ends.end()), ends.end());
    }

    std::vector<i64> calls_on(const Plan& plan, i64 device) const {
        std::vector<i64> found;
        for (int call = 0; call < flow_.n_calls; ++call) {
            const bool is_here = plan[call].first <= device && device < end_of(plan, call);
            found.push_back(is_here ? plan[call].first : kNone);
            found.push_back(is_here ? choice_of(plan, call).strategy : kNone);
        }
        return found;
    }

    // ------------------------------------------------------------ chain

    // Make one step; return true at a plan that would be the best one.
    bool step() {
        if (stage_ == kNext) {
            const double cooled = static_cast<double>(number_) / static_cast<double>(n_proposals_);
            const double temperature = first_ * kind_.hot * std::pow(kind_.cooled, cooled);
            limit_ = score_ - temperature * std::log(1.0 - random_.unit());
            propose();
            ++number_;
            stage_ = kProposed;
        }
        double extra = 0.0;
        if (stage_ == kProposed) {
            double quick = quickly(proposal_);
            if (quick <= limit_) quick = period_of(proposal_, false, limit_);
            if (quick > limit_) return stage_ = kNext, false;
            const double most = kind_.passes ? limit_ : 0.0;
            extra = first_ * lacking(proposal_, most / first_);
            if (extra > most || quick + extra > limit_) return stage_ = kNext, false;
            period_ = period_of(proposal_, true, limit_ - extra);
            if (period_ + extra > limit_) return stage_ = kNext, false;
            if (extra == 0.0 && period_ < least_) return stage_ = kAsked, true;
        } else if (stage_ == kAccepted) {
            least_ = period_;
        } else {  // by what is known now, it may lack memory
            extra = first_ * lacking(proposal_, kInf);
            if (extra == 0.0 || !kind_.passes || period_ + extra > limit_) return stage_ = kNext, false;
        }
        plan_ = proposal_, score_ = period_ + extra, stage_ = kNext;
        if (extra == 0.0 && period_ < kNearBest * least_) keep_apart();
        return false;
    }

    // Keep the plan if it is the best one with its arrangement: sizes of meshes and relations between them.
    void keep_apart() {
        std::vector<i64> key;
        for (int call = 0; call < flow_.n_calls; ++call) {
            key.push_back(choice_of(plan_, call).n_devices);
            for (int other = 0; other < call; ++other) key.push_back(relation(plan_, other, call));
        }
        const auto found = apart_.find(key);
        if (found != apart_.end() && found->second.period <= period_) return;
        apart_[key] = {period_, number_, plan_};
        if (apart_.size() > kMostApart) drop_far();
    }

    // Drop plans that are far from the best one by now, and of the others the slower half if they are too many.
    void drop_far() {
        double limit = kNearBest * least_;
        if (apart_.size() > kMostApart) {
            std::vector<double> periods;
            for (const auto& [key, known] : apart_) periods.push_back(known.period);
            std::nth_element(periods.begin(), periods.begin() + kMostApart / 2, periods.end());
            limit = std::min(limit, periods[kMostApart / 2]);
        }
        for (auto one = apart_.begin(); one != apart_.end();) {
            one = one->second.period < limit ? std::next(one) : apart_.erase(one);
        }
    }

    double quickly(const Plan& plan) const {  // all work on all devices, and cycles of waits
        double area = 0.0;
        for (int call = 0; call < flow_.n_calls; ++call) {
            area += choice_of(plan, call).least * static_cast<double>(choice_of(plan, call).n_devices);
        }
        double most = area / static_cast<double>(n_devices_);
        for (const Cycle& cycle : flow_.cycles) {
            double around = 0.0;
            each(cycle.calls, [&](int call) { around += choice_of(plan, call).least; });
            most = std::max(most, around / cycle.lag);
        }
        return most;
    }

    double lacking(const Plan& plan, double limit) {
        if (capacity_ == kInf) return 0.0;
        const double more = static_cast<double>(likely(plan, capacity_ * (1.0 + limit / kind_.lacking))) - capacity_;
        return more > 0.0 ? kind_.lacking * more / capacity_ : 0.0;
    }

    // ------------------------------------------------------------ proposals

    void propose() {
        do {
            const bool is_apart = random_.unit() < kind_.apart;
            const double share = random_.unit();
            proposal_ = plan_, changed_ = 0;
            if (is_apart && flow_.n_calls > 1) {
                put_beside();
            } else if (share < kind_.groups) {
                move_calls(group());
            } else {
                Calls calls = all_calls();
                const std::size_t n = share < kind_.groups + kind_.pairs && flow_.n_calls > 1 ? 2 : 1;
                random_.shuffle(calls, n);
                for (std::size_t i = 0; i < n; ++i) move_calls({calls[i]});
            }
        } while (!changed_ || !is_legal());
    }

    Calls all_calls() const {
        Calls calls(flow_.n_calls);
        for (int call = 0; call < flow_.n_calls; ++call) calls[call] = call;
        return calls;
    }

    void put(int call, i64 first, int choice) {
        proposal_[call] = {first, choice};
        changed_ |= u64{1} << call;
    }

    void put_beside() {
        i64 start = 0, end = n_devices_;
        if (random_.below(2)) {
            const int like = random_.below(flow_.n_calls);
            start = plan_[like].first, end = end_of(plan_, like);
        }
        Calls calls = all_calls();
        random_.shuffle(calls, 2);
        i64 room = end - start - 1;
        for (int i = 0; i < 2; ++i) {
            const int call = calls[i];
            const auto& sizes = sizes_[call];
            const auto n = std::upper_bound(sizes.begin(), sizes.end(), room) - sizes.begin();
            if (!n || fixed_[call] >= 0) {
                changed_ = 0;
                return;
            }
            const i64 size = i && random_.unit() < kind_.filling ? sizes[n - 1] : sizes[random_.below(n)];
            put(call, i ? end - size : start, quicker(call, of_size_[call].at(size)));
            room = end - start - size;
        }
    }

    int quicker(int call, const Calls& numbers) {
        const int one = random_.of(numbers), other = random_.of(numbers);
        return choices_[call][other].seconds < choices_[call][one].seconds ? other : one;
    }

    Calls group() {
        if (random_.unit() < 0.5) return random_.of(roles_);
        const int like = random_.below(flow_.n_calls);
        Calls found;
        for (int call = 0; call < flow_.n_calls; ++call) {
            if (is_same_span(plan_, call, like)) found.push_back(call);
        }
        if (found.size() > 2 && random_.unit() < 0.5) {
            const std::size_t n = 2 + random_.below(found.size() - 1);
            random_.shuffle(found, n);
            found.resize(n);
        }
        return found;
    }

    void move_calls(const Calls& group) {
        i64 pinned = -1, start, size;
        for (int call : group) {
            if (fixed_[call] < 0) continue;
            if (pinned >= 0 && pinned != fixed_[call]) return;
            pinned = fixed_[call];
        }
        if (pinned < 0 && random_.unit() < kind_.joining) {
            const int like = random_.below(flow_.n_calls);
            start = plan_[like].first, size = end_of(plan_, like) - start;
        } else {
            size = random_.of(sizes_[group[0]]);
            start = pinned >= 0 ? pinned : random_start(size);
        }
        for (int call : group) {
            if (!of_size_[call].count(size)) return;
        }
        i64 strategy = -1;
        for (int call : group) {
            const auto found = alike_[call].find(strategy);
            const bool is_like = found != alike_[call].end() && random_.unit() < kind_.like_the_last;
            const int choice = quicker(call, is_like ? found->second : of_size_[call].at(size));
            put(call, start, choice);
            strategy = choices_[call][choice].strategy;
        }
    }

    i64 random_start(i64 size) {
        const i64 node = n_per_node_, n_nodes = n_devices_ / node;
        if (size >= node) return node * random_.below(n_nodes - size / node + 1);
        const i64 at = node * random_.below(n_nodes);
        return at + size * random_.below(node / size);
    }

    bool is_legal() const {  // meshes share no devices, or one is a part of the other
        bool is_good = true;
        each(changed_, [&](int call) {
            const i64 first = proposal_[call].first, end = end_of(proposal_, call);
            for (int other = 0; other < flow_.n_calls && is_good; ++other) {
                const i64 begin = proposal_[other].first, until = end_of(proposal_, other);
                const bool is_apart = end <= begin || until <= first;
                const bool is_part = (begin <= first && end <= until) || (first <= begin && until <= end);
                is_good = is_apart || is_part;
            }
        });
        return is_good;
    }

    // ------------------------------------------------------------ period

    double period_of(const Plan& plan, bool has_moves, double limit) {
        const int n = flow_.n_calls;
        i64 edges[2 * kMostCalls];
        int n_edges = 0;
        for (int call = 0; call < n; ++call) {
            edges[n_edges++] = plan[call].first, edges[n_edges++] = end_of(plan, call);
        }
        std::sort(edges, edges + n_edges);
        n_edges = static_cast<int>(std::unique(edges, edges + n_edges) - edges);
        const auto place = [&](i64 edge) { return std::lower_bound(edges, edges + n_edges, edge) - edges; };
        Part parts[kMostCalls];
        for (int call = 0; call < n; ++call) {
            Part& part = parts[call];
            part.run = choice_of(plan, call).least;
            part.mesh = (u64{1} << place(end_of(plan, call))) - (u64{1} << place(plan[call].first));
            part.begin = part.finish = part.mesh;
        }
        if (has_moves) add_moves(plan, parts);
        add_last_ranks(plan, parts, n_edges);
        const int n_segments = n_edges - 1;
        double bound = std::max(busiest(parts, n_segments), slowest_cycle(parts, n_segments));
        if (bound >= limit) return bound;
        if (alone_ != 1.0) {
            share(plan, parts);
            bound = std::max(busiest(parts, n_segments), slowest_cycle(parts, n_segments));
        }
        return std::max(bound, Run(flow_, parts).period());
    }

    // Let calls be as fast as they are while other devices of their nodes wait.
    void share(const Plan& plan, Part* parts) {
        for (int call = 0; call < flow_.n_calls; ++call) parts[call].run = choice_of(plan, call).seconds;
        cut(plan);
        for (int round = 0; round < kSharingRounds; ++round) {
            Run(flow_, parts, &bars_).period();
            const auto shares = waiting_shares();
            for (int call = 0; call < flow_.n_calls; ++call) {
                parts[call].run = choice_of(plan, call).seconds * (1.0 - shares[call] + shares[call] / alone_);
            }
        }
    }

    // Cut nodes into pieces, of which all devices have the same calls.
    void cut(const Plan& plan) {
        edges_.clear(), pieces_.clear();
        for (i64 edge = 0; edge <= n_devices_; edge += n_per_node_) edges_.push_back(edge);
        add_ends(plan, edges_);
        for (std::size_t i = 0; i + 1 < edges_.size(); ++i) {
            const i64 start = edges_[i], end = edges_[i + 1];
            u64 calls = 0;
            for (int call = 0; call < flow_.n_calls; ++call) {
                if (plan[call].first <= start && end <= end_of(plan, call)) calls |= u64{1} << call;
            }
            pieces_.push_back({start / n_per_node_, static_cast<double>(end - start), calls});
        }
    }

    // Return for each call the share of its time in which the other devices of its nodes wait: sharing.py.
    std::array<double, kMostCalls> waiting_shares() const {
        std::array<double, kMostCalls> waited{}, possible{};
        for (const Bar& bar : bars_) {
            const double length = bar.end - bar.start;
            for (std::size_t first = 0, last; first < pieces_.size(); first = last) {  // a node after the other
                double own = 0.0;
                for (last = first; last < pieces_.size() && pieces_[last].node == pieces_[first].node; ++last) {
                    if (pieces_[last].calls >> bar.call & 1) own += pieces_[last].n_devices;
                }
                if (own == 0.0) continue;
                possible[bar.call] += length * own * static_cast<double>(n_per_node_ - 1);
                for (std::size_t i = first; i < last; ++i) {
                    if (pieces_[i].calls >> bar.call & 1) continue;
                    waited[bar.call] += own * pieces_[i].n_devices * (length - used(bar, pieces_[i].calls));
                }
            }
        }
        for (int call = 0; call < flow_.n_calls; ++call) {
            waited[call] = possible[call] > 0.0 ? std::clamp(waited[call] / possible[call], 0.0, 1.0) : 0.0;
        }
        return waited;
    }

    // Return the seconds of a bar in which some of these calls compute, which share devices.
    double used(const Bar& bar, u64 calls) const {
        double seconds = 0.0;
        for (const Bar& other : bars_) {
            if (!(calls >> other.call & 1)) continue;
            seconds += std::max(0.0, std::min(bar.end, other.end) - std::max(bar.start, other.start));
        }
        return seconds;
    }

    void add_moves(const Plan& plan, Part* parts) {
        for (const Move& move : flow_.moves) {
            const bool is_same = is_same_place(plan, move.source, move.target);
            if (is_same && move.owner == move.target) continue;  // no hook is there
            Part& part = parts[move.owner];
            const double seconds = seconds_of(plan, move);
            const u64 both = parts[move.source].mesh | parts[move.target].mesh;
            if (move.is_after) {
                part.after += seconds, part.finish |= both, part.has_after = true;
            } else {
                part.before += seconds, part.begin |= both, part.has_before = true;
            }
        }
    }

    double seconds_of(const Plan& plan, const Move& move) {
        const Key key{move.source, move.target, choice_of(plan, move.source).strategy,
                      choice_of(plan, move.target).strategy, relation(plan, move.source, move.target)};
        const auto found = moves_.find(key);
        if (found == moves_.end()) throw Missing{kAsksMove, key};
        return found->second;
    }

    i64 relation(const Plan& plan, int one, int other) const {  // same, inside, around, beside, apart
        const i64 first = plan[one].first, end = end_of(plan, one), begin = plan[other].first,
                  until = end_of(plan, other);
        if (first == begin && end == until) return 0;
        if (first <= begin && until <= end) return 1;
        if (begin <= first && end <= until) return 2;
        return first / n_per_node_ == begin / n_per_node_ ? 3 : 4;
    }

    void add_last_ranks(const Plan& plan, Part* parts, int n_bits) const {
        u64 meshes[kMostCalls], bits[kMostCalls];
        int n_late = 0;
        bool is_split = false;
        for (int call = 0; call < flow_.n_calls; ++call) {
            const i64 n_split = choice_of(plan, call).n_split;
            is_split |= n_split != 0;
            if (n_split > 1 && std::find(meshes, meshes + n_late, parts[call].mesh) == meshes + n_late) {
                meshes[n_late] = parts[call].mesh, bits[n_late] = u64{1} << (n_bits + n_late);
                ++n_late;
            }
        }
        const auto of_whole = [&](u64 segments) {
            u64 found = 0;
            for (int i = 0; i < n_late; ++i) found |= (segments & meshes[i]) == meshes[i] ? bits[i] : 0;
            return found;
        };
        for (int call = 0; call < flow_.n_calls; ++call) {
            Part& part = parts[call];
            const i64 n_split = choice_of(plan, call).n_split;
            part.begin_bits = part.begin | of_whole(part.begin);
            part.mesh_bits = part.mesh | of_whole(part.mesh);
            if (!is_split) continue;
            if (n_split > 1) {
                part.late_bits = bits[std::find(meshes, meshes + n_late, part.mesh) - meshes];
            } else if (n_split == 1) {
                part.late_bits = part.mesh;
            }
        }
    }

    double busiest(const Part* parts, int n_segments) const {
        double load[2 * kMostCalls];
        std::fill_n(load, n_segments, 0.0);
        for (int call = 0; call < flow_.n_calls; ++call) {
            const Part& part = parts[call];
            if (part.before != 0.0) each(part.begin, [&](int segment) { load[segment] += part.before; });
            if (part.run != 0.0) each(part.mesh, [&](int segment) { load[segment] += part.run; });
            if (part.after != 0.0) each(part.finish, [&](int segment) { load[segment] += part.after; });
        }
        return most_of(load, n_segments);
    }

    double slowest_cycle(const Part* parts, int n_segments) const {
        double seconds[kMostCalls], most = 0.0;
        for (int call = 0; call < flow_.n_calls; ++call) {
            seconds[call] = parts[call].before + parts[call].run + parts[call].after;
        }
        for (const Cycle& cycle : flow_.cycles) {
            double work[2 * kMostCalls], around = 0.0;
            std::fill_n(work, n_segments, 0.0);
            each(cycle.between, [&](int call) {
                each(parts[call].mesh, [&](int segment) { work[segment] += seconds[call]; });
            });
            each(cycle.calls, [&](int call) { around += seconds[call]; });
            most = std::max(most, (around + most_of(work, n_segments)) / cycle.lag);
        }
        return most;
    }

    // ------------------------------------------------------------ bytes

    i64 likely(const Plan& plan, double limit) {
        i64 n_bytes = need(plan, limit);
        if (lacking_.empty()) return n_bytes;
        ends_.clear();
        add_ends(plan, ends_);
        for (std::size_t i = 1; i < ends_.size(); ++i) {  // stretches of devices that have the same calls
            const i64 first = ends_[i - 1], end = ends_[i];
            const i64 highest = *std::max_element(&level_[first], &level_[first] + (end - first));
            if (highest + most_lacking_ <= n_bytes) continue;
            const auto found = lacking_.find(calls_on(plan, first));
            if (found != lacking_.end()) n_bytes = std::max(n_bytes, highest + found->second);
        }
        return n_bytes;
    }

    i64 need(const Plan& plan, double limit) {
        level_.assign(n_devices_, 0), most_.assign(n_devices_, 0);
        for (int call = 0; call < flow_.n_calls; ++call) {
            if (flow_.homes[call] != call) continue;
            const Choice& choice = known(plan, call);
            i64* level = &level_[plan[call].first];
            for (i64 i = 0; i < choice.n_devices; ++i) level[i] += choice.kept[i];
        }
        for (int call = 0; call < flow_.n_calls; ++call) add_used(plan, call);
        i64 highest = 0;
        for (i64 i = 0; i < n_devices_; ++i) highest = std::max(highest, level_[i] += most_[i]);
        if (!connects_ || static_cast<double>(highest) > limit) return highest;
        add_connections(plan);
        return *std::max_element(level_.begin(), level_.end());
    }

    const Choice& known(const Plan& plan, int call) const {
        const Choice& choice = choice_of(plan, call);
        if (!choice.is_known) throw Missing{kAsksDevices, {call, plan[call].choice, 0, 0, 0}};
        return choice;
    }

    void add_used(const Plan& plan, int call) {
        const i64 first = plan[call].first, n = choice_of(plan, call).n_devices;
        const i64* used = used_by(plan, call).data();
        for (int other = 0; other < flow_.n_calls; ++other) {
            if (flow_.homes[other] != other || choice_of(plan, other).begun.empty()) continue;
            if (!(flow_.before[other] >> call & 1) && flow_.sources[call] != other) continue;
            const std::vector<i64>& begun = choice_of(plan, other).begun;
            const i64 from = std::max(first, plan[other].first), until = std::min(first + n, end_of(plan, other));
            if (used != sum_.data()) sum_.assign(used, used + n), used = sum_.data();
            for (i64 i = from; i < until; ++i) sum_[i - first] += begun[i - plan[other].first];
        }
        for (i64 i = 0; i < n; ++i) most_[first + i] = std::max(most_[first + i], used[i]);
    }

    const std::vector<i64>& used_by(const Plan& plan, int call) {
        const int home = flow_.sources[call];
        if (home < 0 || is_same_place(plan, home, call)) return known(plan, call).used;
        const Choice& source = choice_of(plan, home);
        if (known_links(plan, call)) {
            const Key key{call, plan[call].choice, plan[call].first, plan[home].first,
                          2 * source.strategy + source.is_gathered};
            const auto found = ordered_.find(key);
            if (found == ordered_.end()) throw Missing{kAsksOrdered, key};
            return found->second;
        }
        const bool is_shared = plan[home].first < end_of(plan, call) && plan[call].first < end_of(plan, home);
        const Key key{call, source.strategy, source.is_gathered, plan[call].choice,
                      is_shared ? plan[home].first - plan[call].first : kNone};
        const auto found = arriving_.find(key);
        if (found == arriving_.end()) throw Missing{kAsksArriving, key};
        return found->second;
    }

    // Return the links of a call whose ranks have an order that is known; null if it is not.
    const Links* known_links(const Plan& plan, int call) const {
        const int home = flow_.sources[call];
        if (home < 0 || known_links_.empty() || is_same_place(plan, home, call)) return nullptr;
        const auto found = known_links_.find({call, plan[call].first, choice_of(plan, call).strategy, plan[home].first,
                                              choice_of(plan, home).strategy});
        return found == known_links_.end() ? nullptr : &found->second;
    }

    const Links& links_of(const Plan& plan, int call) {
        if (const Links* known = known_links(plan, call)) return *known;
        const Key key{call, plan[call].first, choice_of(plan, call).strategy, kNone, kNone};
        const auto found = plain_links_.find(key);
        if (found == plain_links_.end()) throw Missing{kAsksLinks, key};
        return found->second;
    }

    void add_connections(const Plan& plan) {
        peers_.assign(n_devices_, node_peers_), rings_.clear(), messages_.clear();
        for (int call = 0; call < flow_.n_calls; ++call) {
            const Links& links = links_of(plan, call);
            for (std::size_t i = 0; i < links.peers.size(); ++i) peers_[links.first + i] |= links.peers[i];
            rings_.insert(rings_.end(), links.rings.begin(), links.rings.end());
            for (const Messages& one : links.messages) messages_.push_back(&one);
        }
        count_rings();
        for (i64 i = 0; i < n_devices_; ++i) {
            const i64 n_pairs = __builtin_popcountll(peers_[i]) - (peers_[i] != 0);
            level_[i] += ring_bytes_ * n_rings_[i] + pair_bytes_ * n_pairs;
        }
        std::sort(messages_.begin(), messages_.end(), [](auto* one, auto* other) { return one->ring < other->ring; });
        for (std::size_t i = 0; i < messages_.size();) {
            most_.assign(n_devices_, 0);
            const Ring& ring = messages_[i]->ring;
            for (; i < messages_.size() && messages_[i]->ring.is_like(ring); ++i) {
                const auto& counts = messages_[i]->counts;
                i64* most = &most_[messages_[i]->ring.first];
                for (std::size_t k = 0; k < counts.size(); ++k) most[k] = std::max(most[k], counts[k]);
            }
            for (i64 k = 0; k < n_devices_; ++k) level_[k] += pair_bytes_ * most_[k];
        }
    }

    // Count the rings that each device is in at least; unknown ones may be among those that are known.
    void count_rings() {
        std::sort(rings_.begin(), rings_.end());
        std::size_t n = 0;
        for (const Ring& ring : rings_) {  // those of the same ranks that share some become one
            if (n && rings_[n - 1].is_like(ring) && ring.first <= rings_[n - 1].end) {
                rings_[n - 1].end = std::max(rings_[n - 1].end, ring.end);
            } else {
                rings_[n++] = ring;
            }
        }
        rings_.resize(n);
        n_rings_.assign(n_devices_ + 1, 0);
        for (const Ring& ring : rings_) {
            if (ring.stride) ++n_rings_[ring.first], --n_rings_[ring.end];
        }
        for (i64 i = 0; i < n_devices_; ++i) n_rings_[i + 1] += n_rings_[i];
        for (const Ring& unknown : rings_) {
            if (unknown.stride) break;  // they come first
            alike_rings_.assign(n_devices_ + 1, 0);
            for (const Ring& ring : rings_) {
                if (ring.stride && ring.n == unknown.n) ++alike_rings_[ring.first], --alike_rings_[ring.end];
            }
            for (i64 i = 0; i < n_devices_; ++i) {
                if (unknown.first <= i && i < unknown.end) n_rings_[i] += alike_rings_[i] <= unknown.phase;
                alike_rings_[i + 1] += alike_rings_[i];
            }
        }
    }

    Flow flow_;
    i64 n_devices_, n_per_node_, ring_bytes_, pair_bytes_;
    bool connects_;
    u64 node_peers_;  // devices of a node that a device has connections to, whatever calls there are
    double capacity_, alone_;
    std::vector<i64> fixed_;
    std::vector<std::vector<Choice>> choices_;
    std::vector<std::vector<i64>> sizes_;
    std::vector<std::unordered_map<i64, Calls>> of_size_, alike_;
    std::vector<Calls> roles_;

    Plan plan_, proposal_;
    u64 changed_ = 0;
    Kind kind_{};
    Random random_;
    i64 n_proposals_ = 0, number_ = 0;
    double first_ = -1.0, score_ = 0.0, least_ = 0.0, limit_ = 0.0, period_ = 0.0;
    Stage stage_ = kNext;

    std::vector<Bar> bars_;
    std::vector<i64> edges_;
    std::vector<Piece> pieces_;
    Table<double> moves_;
    Table<std::vector<i64>> arriving_, ordered_;
    std::size_t n_kept_ = 0;
    Table<Links> plain_links_, known_links_;
    std::map<std::vector<i64>, i64> lacking_;
    i64 most_lacking_ = 0;
    std::map<std::vector<i64>, Known> apart_;
    std::vector<i64> level_, most_, sum_, ends_, n_rings_, alike_rings_;
    std::vector<u64> peers_;
    std::vector<Ring> rings_;
    std::vector<const Messages*> messages_;
};

}  // namespace

extern "C" {

void* annealing_new(const i64* longs, const double* doubles) { return new Annealing(longs, doubles); }

void annealing_free(void* annealing) { delete static_cast<Annealing*>(annealing); }

void annealing_begin(void* annealing, const i64* plan, const i64* settings, const double* shares) {
    static_cast<Annealing*>(annealing)->begin(plan, settings, shares);
}

i64 annealing_go(void* annealing, i64 n, i64* asked, double* period) {
    return static_cast<Annealing*>(annealing)->go(n, asked, period);
}

void annealing_answer(void* annealing, i64 is_accepted) {
    static_cast<Annealing*>(annealing)->answer(is_accepted != 0);
}

void annealing_lacks(void* annealing, const i64* plan, i64 device, i64 n_bytes) {
    static_cast<Annealing*>(annealing)->lacks(plan, device, n_bytes);
}

i64 annealing_apart(void* annealing, i64 most, i64* plans, double* periods) {
    return static_cast<Annealing*>(annealing)->apart(most, plans, periods);
}

void annealing_give(void* annealing, i64 code, const i64* key, const i64* values, double seconds) {
    auto* own = static_cast<Annealing*>(annealing);
    if (code == kAsksDevices) own->give_devices(key, values);
    if (code == kAsksArriving || code == kAsksOrdered) own->give_arriving(key, values, code == kAsksOrdered);
    if (code == kAsksMove) own->give_move(key, seconds);
    if (code == kAsksLinks) own->give_links(key, values);
}

i64 annealing_value(void* annealing, const i64* plan, i64 is_bytes, double limit, i64* asked, double* found) {
    return static_cast<Annealing*>(annealing)->value(plan, is_bytes != 0, limit, asked, found);
}
}
