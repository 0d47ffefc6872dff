// The inner loops of the search for fused schedules: realrl/plan/fusion/listing.py and descent.py in C++, step by step.
//
// Whole numbers are exact; the little floating point is written in the order of the Python, and must be compiled without
// contraction or reordering.

#include <algorithm>
#include <cstdint>
#include <functional>
#include <queue>
#include <utility>
#include <vector>

namespace {

using i64 = std::int64_t;
using u64 = std::uint64_t;
constexpr int kWeights = 5;

u64 mixed(u64 seed, u64 number) {  // SplitMix64
    u64 z = seed + (number + 1) * 0x9E3779B97F4A7C15ull;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
}

double noise_of(u64 seed, u64 task) { return static_cast<double>(mixed(seed, task) >> 11) * 0x1p-53; }

// Problem of problem.py, as compiled.py lays it out.
struct Problem {
    i64 n_devices, n_stages, work, longest;
    const i64 *n_micro_batches, *pipeline, *position, *last, *device_begin, *duration, *activation, *path, *devices;
    std::vector<i64> base;
    std::vector<std::vector<i64>> letters_on;
    bool has_gangs = false;

    explicit Problem(const i64* data) {
        n_devices = data[0], n_stages = data[1], work = data[2], longest = data[3];
        const i64* at = data + 4;
        auto take = [&](i64 n) { const i64* taken = at; at += n; return taken; };
        n_micro_batches = take(n_stages), pipeline = take(n_stages), position = take(n_stages), last = take(n_stages);
        device_begin = take(n_stages + 1), duration = take(2 * n_stages), activation = take(n_stages);
        path = take(2 * n_stages), devices = at;
        base.assign(1, 0);
        for (i64 s = 0; s < n_stages; ++s) {
            base.push_back(base.back() + n_micro_batches[s]);
            base.push_back(base.back() + n_micro_batches[s]);
        }
        letters_on.resize(n_devices);
        for (i64 s = 0; s < n_stages; ++s) {
            has_gangs |= device_begin[s + 1] - device_begin[s] > 1;
            for (i64 k = device_begin[s]; k < device_begin[s + 1]; ++k) {
                letters_on[devices[k]].push_back(2 * s);
                letters_on[devices[k]].push_back(2 * s + 1);
            }
        }
    }
};

// ---------------------------------------------------------------- listing.py

struct Listing {
    const Problem& problem;
    const i64 *caps, *quotas;
    const double* w;
    double noise, patience;  // a negative patience is none
    u64 seed;
    i64 peak = 0;
    std::vector<i64> started, done, held, ending;
    std::vector<std::pair<i64, i64>> coming;
    std::vector<char> is_free, dirty;
    std::vector<std::vector<i64>> words;
    std::priority_queue<std::pair<i64, i64>, std::vector<std::pair<i64, i64>>, std::greater<>> ends;
    double by_path, by_work;

    Listing(const Problem& p, const i64* caps_, const i64* quotas_, const double* w_, double noise_,
            double patience_, u64 seed_)
        : problem(p), caps(caps_), quotas(quotas_), w(w_), noise(noise_), patience(patience_), seed(seed_),
          started(2 * p.n_stages), done(2 * p.n_stages), held(p.n_devices), ending(2 * p.n_stages), is_free(p.n_devices, 1), dirty(p.n_devices, 1), words(p.n_devices),
          by_path(1.0 / static_cast<double>(p.longest)), by_work(1.0 / static_cast<double>(p.work)) {}

    i64 fed_at(i64 letter, i64 m, i64 time) const {
        if (done[letter] > m) return time;
        return started[letter] > m ? ending[letter] : -1;
    }

    i64 arrival_of(i64 letter, i64 time) const {
        i64 s = letter / 2, m = started[letter];
        if (m == problem.n_micro_batches[s]) return -1;
        if (letter % 2) {
            i64 arrival = fed_at(letter - 1, m, time);
            if (arrival < 0 || problem.last[s]) return arrival;
            i64 other = fed_at(letter + 2, m, time);
            return other < 0 ? other : std::max(arrival, other);
        }
        if (m - done[letter + 1] >= quotas[s]) return -1;
        for (i64 k = problem.device_begin[s]; k < problem.device_begin[s + 1]; ++k)
            if (held[problem.devices[k]] + problem.activation[s] > caps[problem.devices[k]]) return -1;
        return problem.position[s] ? fed_at(letter - 2, m, time) : time;
    }

    double urgency(i64 letter, i64 time) const {
        i64 s = letter / 2, m = started[letter];
        const double* v = w + (2 * problem.pipeline[s] + letter % 2) * kWeights;
        i64 in_flight = started[letter & ~1ll] - done[letter | 1];
        double u = v[0] + v[1] * (static_cast<double>(problem.path[letter]) * by_path);
        u = u + v[2] * (static_cast<double>(m) / static_cast<double>(problem.n_micro_batches[s]));
        u = u + v[3] * (static_cast<double>(time) * by_work);
        u = u + v[4] * (static_cast<double>(in_flight) / static_cast<double>(problem.n_stages));
        return u + noise * noise_of(seed, problem.base[letter] + m);
    }

    i64 start_on(i64 device, i64 time) {
        if (!is_free[device]) return 0;
        i64 best = -1;
        double most = 0.0;
        coming.clear();
        for (i64 letter : problem.letters_on[device]) {
            i64 arrival = arrival_of(letter, time);
            if (arrival == time) {
                double u = urgency(letter, time);
                if (best < 0 || u > most) best = letter, most = u;
            } else if (arrival > time) {
                coming.push_back({letter, arrival});
            }
        }
        if (best < 0) return 0;
        i64 s = best / 2, begin = problem.device_begin[s], end = problem.device_begin[s + 1];
        for (i64 k = begin; k < end; ++k)
            if (!is_free[problem.devices[k]]) return 0;
        i64 duration = problem.duration[best];
        if (patience >= 0)
            for (auto [letter, arrival] : coming)
                if (arrival - time < duration) {
                    double wait = patience * (static_cast<double>(arrival - time) / static_cast<double>(duration));
                    if (urgency(letter, time) > most + wait) return 0;
                }
        ++started[best];
        for (i64 k = begin; k < end; ++k) {
            i64 d = problem.devices[k];
            is_free[d] = 0;
            words[d].push_back(best);
            if (best % 2 == 0) peak = std::max(peak, held[d] += problem.activation[s]);
        }
        ending[best] = time + duration;
        ends.push({time + duration, best});
        return end - begin;
    }

    void mark(i64 stage) {
        for (i64 k = problem.device_begin[stage]; k < problem.device_begin[stage + 1]; ++k) dirty[problem.devices[k]] = 1;
    }

    i64 run() {
        i64 n_left = 0, time = 0;
        for (i64 s = 0; s < problem.n_stages; ++s)
            if (quotas[s]) n_left += 2 * problem.n_micro_batches[s] * (problem.device_begin[s + 1] - problem.device_begin[s]);
        while (true) {
            for (i64 d = 0; d < problem.n_devices; ++d)
                if (dirty[d]) dirty[d] = 0, n_left -= start_on(d, time);
            if (ends.empty()) return n_left ? -1 : time;
            time = ends.top().first;
            while (!ends.empty() && ends.top().first == time) {
                i64 letter = ends.top().second, s = letter / 2;
                ends.pop();
                ++done[letter];
                for (i64 k = problem.device_begin[s]; k < problem.device_begin[s + 1]; ++k) {
                    is_free[problem.devices[k]] = 1;
                    if (letter % 2) held[problem.devices[k]] -= problem.activation[s];
                }
                mark(s);
                if (letter % 2 && problem.position[s]) mark(s - 1);
                else if (letter % 2 == 0 && !problem.last[s]) mark(s + 1);
                if (problem.has_gangs) std::fill(dirty.begin(), dirty.end(), 1);
            }
        }
    }
};

// ---------------------------------------------------------------- descent.py

struct State {
    const Problem& problem;
    i64 limit;
    const i64* targets;
    std::vector<i64> letter, first, task, device, before, after, held, start, over, over_at, head, tail, queue, backwards;
    i64 energy = 0;

    State(const Problem& p, const i64* words, i64 limit_, const i64* targets_) : problem(p), limit(limit_), targets(targets_) {
        i64 n_tasks = p.base.back();
        letter.resize(n_tasks), first.resize(n_tasks + 1);
        for (i64 l = 0; l < 2 * p.n_stages; ++l)
            for (i64 t = p.base[l]; t < p.base[l + 1]; ++t)
                letter[t] = l, first[t + 1] = first[t] + p.device_begin[l / 2 + 1] - p.device_begin[l / 2];
        i64 n_slots = first.back();
        task.resize(n_slots), device.resize(n_slots), held.resize(n_slots);
        for (i64 t = 0; t < n_tasks; ++t)
            for (i64 k = 0; k < first[t + 1] - first[t]; ++k)
                task[first[t] + k] = t, device[first[t] + k] = p.devices[p.device_begin[letter[t] / 2] + k];
        before.assign(n_slots, -1), after.assign(n_slots, -1), over_at.assign(n_slots, -1), start.assign(p.n_devices, -1);
        link(words);
        for (i64 slot = 0; slot < n_slots; ++slot) set_held(slot, held[slot], true);
        head.resize(n_tasks), tail.resize(n_tasks);
        set_heads_and_tails();
    }

    i64 duration(i64 t) const { return problem.duration[letter[t]]; }
    i64 delta(i64 t) const {
        i64 a = problem.activation[letter[t] / 2];
        return letter[t] % 2 ? -a : a;
    }
    i64 excess(i64 d, i64 units) const { return std::max<i64>(0, units - targets[d]); }

    // tasks of the pipeline around a task: calls f with each
    template <class F> void feeds(i64 t, F f) const {
        i64 l = letter[t], m = t - problem.base[l], s = l / 2;
        if (l % 2) {
            f(problem.base[l - 1] + m);
            if (!problem.last[s]) f(problem.base[l + 2] + m);
        } else if (problem.position[s]) {
            f(problem.base[l - 2] + m);
        }
    }
    template <class F> void fed(i64 t, F f) const {
        i64 l = letter[t], m = t - problem.base[l], s = l / 2;
        if (l % 2) {
            if (problem.position[s]) f(problem.base[l - 2] + m);
        } else {
            f(problem.base[l + 1] + m);
            if (!problem.last[s]) f(problem.base[l + 2] + m);
        }
    }
    template <class F> void neighbours(i64 t, const std::vector<i64>& links, F f) const {
        for (i64 slot = first[t]; slot < first[t + 1]; ++slot)
            if (links[slot] >= 0) f(task[links[slot]]);
    }
    // slots of two tasks on a device that they share
    template <class F> void shared(i64 x, i64 y, F f) const {
        for (i64 a = first[x]; a < first[x + 1]; ++a)
            for (i64 b = first[y]; b < first[y + 1]; ++b)
                if (device[a] == device[b]) f(a, b);
    }
    bool is_on(i64 t, i64 d) const {
        for (i64 slot = first[t]; slot < first[t + 1]; ++slot)
            if (device[slot] == d) return true;
        return false;
    }
    template <class F> void apart(i64 t, i64 other, const std::vector<i64>& links, F f) const {
        for (i64 slot = first[t]; slot < first[t + 1]; ++slot)
            if (links[slot] >= 0 && !is_on(other, device[slot])) f(task[links[slot]]);
    }

    bool can_swap(i64 x, i64 y) const {
        if (letter[x] == letter[y]) return false;
        bool ok = true;
        feeds(y, [&](i64 t) { ok &= t != x; });
        if (!ok) return false;
        shared(x, y, [&](i64 a, i64 b) { ok &= after[a] == b; });
        if (!ok) return false;
        i64 end = head[y];
        auto check = [&](i64 u) { ok &= u == y || end < head[u] + duration(u); };
        fed(x, check), neighbours(x, after, check);
        if (!ok) return false;
        i64 head_y = 0, tail_x = 0;
        auto later = [&](i64& value) { return [&, this](i64 t) { value = std::max(value, head[t] + duration(t)); }; };
        auto longer = [&](i64& value) { return [&, this](i64 t) { value = std::max(value, tail[t] + duration(t)); }; };
        feeds(y, later(head_y)), apart(y, x, before, later(head_y));
        shared(x, y, [&](i64 a, i64) { if (before[a] >= 0) later(head_y)(task[before[a]]); });
        i64 head_x = head_y + duration(y);
        feeds(x, later(head_x)), apart(x, y, before, later(head_x));
        fed(x, longer(tail_x)), apart(x, y, after, longer(tail_x));
        shared(x, y, [&](i64, i64 b) { if (after[b] >= 0) longer(tail_x)(task[after[b]]); });
        i64 tail_y = tail_x + duration(x);
        fed(y, longer(tail_y)), apart(y, x, after, longer(tail_y));
        return head_y + duration(y) + tail_y <= limit && head_x + duration(x) + tail_x <= limit;
    }

    bool move(u64 seed, u64 number, i64 temperature) {
        u64 z = mixed(seed, number);
        i64 x = (z & 1) && !over.empty() ? over[((z >> 32) * over.size()) >> 32] : static_cast<i64>(((z >> 32) * task.size()) >> 32);
        i64 y = after[x];
        if (y < 0) return false;
        i64 tx = task[x], ty = task[y];
        if (!can_swap(tx, ty)) return false;
        i64 more = 0;
        shared(tx, ty, [&](i64 a, i64 b) { more += excess(device[a], held[b] - delta(tx)) - excess(device[a], held[a]); });
        u64 bits = ((z >> 1) & ((1u << 20) - 1)) | (1u << 20);
        if (more > temperature * __builtin_ctzll(bits)) return false;
        swap(tx, ty);
        return true;
    }

    void swap(i64 x, i64 y) {
        queue.assign({y, x});
        backwards.assign({x, y});
        shared(x, y, [&](i64 a, i64 b) {
            i64 p = before[a], n = after[b];
            if (n >= 0) queue.push_back(task[n]);
            if (p >= 0) backwards.push_back(task[p]);
            before[b] = p, after[b] = a, before[a] = b, after[a] = n;
            if (p < 0) start[device[a]] = b;
            else after[p] = b;
            if (n >= 0) before[n] = a;
            i64 total = held[b];
            set_held(b, total - delta(x), false);
            set_held(a, total, false);
        });
        auto push = [this](i64 t) { queue.push_back(t); };
        for (std::size_t at = 0; at < queue.size(); ++at) {
            i64 t = queue[at], value = 0;
            auto later = [&](i64 u) { value = std::max(value, head[u] + duration(u)); };
            feeds(t, later), neighbours(t, before, later);
            if (value == head[t]) continue;
            head[t] = value;
            fed(t, push), neighbours(t, after, push);
        }
        queue.swap(backwards);
        for (std::size_t at = 0; at < queue.size(); ++at) {
            i64 t = queue[at], value = 0;
            auto longer = [&](i64 u) { value = std::max(value, tail[u] + duration(u)); };
            fed(t, longer), neighbours(t, after, longer);
            if (value == tail[t]) continue;
            tail[t] = value;
            feeds(t, push), neighbours(t, before, push);
        }
    }

    void set_held(i64 slot, i64 units, bool is_new) {
        i64 d = device[slot];
        if (!is_new) energy -= excess(d, held[slot]);
        held[slot] = units;
        i64 e = excess(d, units), at = over_at[slot];
        energy += e;
        if (e && at < 0) {
            over_at[slot] = over.size();
            over.push_back(slot);
        } else if (!e && at >= 0) {
            i64 last = over.back();
            over.pop_back();
            if (last != slot) over[at] = last, over_at[last] = at;
            over_at[slot] = -1;
        }
    }

    void link(const i64* words) {
        for (i64 d = 0; d < problem.n_devices; ++d) {
            std::vector<i64> done(2 * problem.n_stages);
            i64 n = 0, last = -1, units = 0;
            for (i64 l : problem.letters_on[d]) n += problem.n_micro_batches[l / 2];
            for (i64 i = 0; i < n; ++i) {
                i64 l = *words++, t = problem.base[l] + done[l]++, slot = first[t];
                while (device[slot] != d) ++slot;
                before[slot] = last;
                if (last < 0) start[d] = slot;
                else after[last] = slot;
                units += delta(t);
                held[slot] = units;
                last = slot;
            }
        }
    }

    void set_heads_and_tails() {
        i64 n = letter.size();
        std::vector<i64> open(n), order;
        for (i64 t = 0; t < n; ++t) {
            auto count = [&](i64) { ++open[t]; };
            feeds(t, count), neighbours(t, before, count);
            if (!open[t]) order.push_back(t);
        }
        for (std::size_t at = 0; at < order.size(); ++at) {
            i64 t = order[at];
            auto later = [&](i64 u) { head[t] = std::max(head[t], head[u] + duration(u)); };
            feeds(t, later), neighbours(t, before, later);
            auto close = [&](i64 u) { if (!--open[u]) order.push_back(u); };
            fed(t, close), neighbours(t, after, close);
        }
        for (auto t = order.rbegin(); t != order.rend(); ++t) {
            auto longer = [&](i64 u) { tail[*t] = std::max(tail[*t], tail[u] + duration(u)); };
            fed(*t, longer), neighbours(*t, after, longer);
        }
    }

    void write(i64* words) const {
        for (i64 slot : start)
            for (; slot >= 0; slot = after[slot]) *words++ = letter[task[slot]];
    }
};

}  // namespace

extern "C" {

// Latency of a rule's list schedule, or -1 where memory lets nothing go on. Writes the peak, and the words, device after device, if
// every stage has a quota.
i64 fusion_list(const i64* data, const i64* caps, const i64* quotas, const double* weights, double noise, double patience,
                u64 seed, i64* peak, i64* words) {
    Problem problem(data);
    Listing run(problem, caps, quotas, weights, noise, patience, seed);
    i64 latency = run.run();
    *peak = run.peak;
    if (latency >= 0)
        for (const auto& word : run.words) words = std::copy(word.begin(), word.end(), words);
    return latency;
}

// Energy after a descent; the words are read, and written back.
i64 fusion_descend(const i64* data, const i64* targets, i64 limit, i64 temperature, i64 n_moves, u64 seed, i64* words) {
    Problem problem(data);
    State state(problem, words, limit, targets);
    for (i64 number = 0; number < n_moves && state.energy; ++number) state.move(seed, number, temperature);
    state.write(words);
    return state.energy;
}

}  // extern "C"
