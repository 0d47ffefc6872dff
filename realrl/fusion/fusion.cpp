// The inner loops of the search for fused schedules: realrl/plan/fusion/listing.py and annealing.py in C++, step by step.
//
// Whole numbers are exact; the little floating point is written in the order of the Python, and must be compiled without
// contraction or reordering.

#include <algorithm>
#include <cstdint>
#include <functional>
#include <limits>
#include <queue>
#include <utility>
#include <vector>

namespace {

using i32 = std::int32_t;
using i64 = std::int64_t;
using u64 = std::uint64_t;
constexpr int kWeights = 5, kPieces = 6;
constexpr i64 kUnlimited = i64{1} << 62;

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
    std::vector<std::vector<i64>> entries;  // ticks from which a stage may begin each micro-batch
    std::vector<i64> starts;
    const i64* keys = nullptr;
    i64 window = kUnlimited, limit = kUnlimited;

    Listing(const Problem& p, const i64* caps_, const i64* quotas_, const double* w_, double noise_,
            double patience_, u64 seed_)
        : problem(p), caps(caps_), quotas(quotas_), w(w_), noise(noise_), patience(patience_), seed(seed_),
          started(2 * p.n_stages), done(2 * p.n_stages), held(p.n_devices), ending(2 * p.n_stages), is_free(p.n_devices, 1), dirty(p.n_devices, 1), words(p.n_devices),
          by_path(1.0 / static_cast<double>(p.longest)), by_work(1.0 / static_cast<double>(p.work)), starts(p.base.back()) {}

    void pace(const double* paces) {
        entries.resize(problem.n_stages);
        for (i64 s = 0; s < problem.n_stages; ++s) {
            if (problem.position[s] || !quotas[s]) continue;
            const double* knots = paces + problem.pipeline[s] * (kPieces + 1);
            const i64 n = problem.n_micro_batches[s];
            for (i64 m = 0; m < n; ++m) {
                const double x = static_cast<double>(m) / static_cast<double>(n) * static_cast<double>(kPieces);
                const i64 piece = std::min<i64>(kPieces - 1, static_cast<i64>(x));
                const double begin = knots[piece], end = knots[piece + 1];
                const double at = (begin + (end - begin) * (x - static_cast<double>(piece))) * static_cast<double>(problem.work);
                const i64 entry = std::max<i64>(0, static_cast<i64>(at));
                entries[s].push_back(entry);
                if (entry) ends.push({entry, -1 - s});
            }
        }
    }

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
        if (problem.position[s]) return fed_at(letter - 2, m, time);
        return entries.empty() ? time : std::max(time, entries[s][m]);
    }

    double urgency(i64 letter, i64 time) const {
        i64 s = letter / 2, m = started[letter];
        if (keys) return -static_cast<double>(keys[problem.base[letter] + m]);
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
        if (keys && !ends.empty() && -most > least_key(device) + static_cast<double>(window)) return 0;
        i64 duration = problem.duration[best];
        if (patience >= 0)
            for (auto [letter, arrival] : coming)
                if (arrival - time < duration) {
                    double wait = patience * (static_cast<double>(arrival - time) / static_cast<double>(duration));
                    if (urgency(letter, time) > most + wait) return 0;
                }
        starts[problem.base[best] + started[best]++] = time;
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

    double least_key(i64 device) const {
        double least = std::numeric_limits<double>::infinity();
        for (i64 letter : problem.letters_on[device])
            if (started[letter] < problem.n_micro_batches[letter / 2])
                least = std::min(least, static_cast<double>(keys[problem.base[letter] + started[letter]]));
        return least;
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
            if (time > limit) return -1;
            while (!ends.empty() && ends.top().first == time) {
                i64 letter = ends.top().second, s = letter / 2;
                ends.pop();
                if (letter < 0) {
                    mark(-1 - letter);
                    continue;
                }
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

// ---------------------------------------------------------------- annealing.py

struct Task {
    i32 feeds[2], fed[2];  // tasks of its pipeline that it waits for, and that wait for it, or the task that is none
    i32 letter, first;     // and its first slot
    i64 end, rest;         // ticks of the longest way to its end, and of that from its start
    i64 duration;
};

template <bool kSingle> struct State {
    const Problem& problem;
    i64 limit, energy = 0, least;  // and what any excess counts at least
    const i64* targets;
    i32 n_tasks, n_slots;
    std::vector<Task> tasks;  // the last one is none: no way passes it
    std::vector<i32> task, device, before, after, start, over, over_at, open, open_at, queue, backwards, sinks;
    std::vector<i64> held;

    State(const Problem& p, const i64* words, i64 limit_, const i64* targets_)
        : problem(p), limit(limit_), targets(targets_), n_tasks(p.base.back()) {
        least = *std::max_element(p.activation, p.activation + p.n_stages) / 2;
        tasks.resize(n_tasks + 1);
        tasks[n_tasks] = {{n_tasks, n_tasks}, {n_tasks, n_tasks}, -1, 0, 0, 0, 0};
        i32 at = 0;
        for (i64 l = 0; l < 2 * p.n_stages; ++l)
            for (i64 t = p.base[l]; t < p.base[l + 1]; ++t) {
                tasks[t] = task_of(l, t - p.base[l]);
                tasks[t].first = at;
                at += p.device_begin[l / 2 + 1] - p.device_begin[l / 2];
            }
        tasks[n_tasks].first = n_slots = at;
        task.resize(n_slots + 1), device.resize(n_slots), held.resize(n_slots);
        for (i32 t = 0; t < n_tasks; ++t)
            for (i32 slot = tasks[t].first; slot < tasks[t + 1].first; ++slot)
                task[slot] = t, device[slot] = p.devices[p.device_begin[tasks[t].letter / 2] + slot - tasks[t].first];
        task[n_slots] = n_tasks;
        before.assign(n_slots, n_slots), after.assign(n_slots, n_slots), start.assign(p.n_devices, n_slots);
        over_at.assign(n_slots, -1), open_at.assign(n_slots, -1);
        link(words);
        for (i32 slot = 0; slot < n_slots; ++slot) set_held(slot, held[slot], true), set_open(slot);
        set_ways();
        for (i64 s = 0; s < p.n_stages; ++s)
            if (!p.position[s]) sinks.push_back(p.base[2 * s + 2] - 1);
    }

    Task task_of(i64 l, i64 m) const {
        const i64 s = l / 2;
        const bool is_first = problem.position[s] == 0, is_last = problem.last[s];
        auto at = [&](i64 letter) { return static_cast<i32>(problem.base[letter] + m); };
        Task t{{n_tasks, n_tasks}, {n_tasks, n_tasks}, static_cast<i32>(l), 0, 0, 0, problem.duration[l]};
        if (l % 2) {
            t.feeds[0] = at(l - 1);
            if (!is_last) t.feeds[1] = at(l + 2);
            if (!is_first) t.fed[0] = at(l - 2);
        } else {
            if (!is_first) t.feeds[0] = at(l - 2);
            t.fed[0] = at(l + 1);
            if (!is_last) t.fed[1] = at(l + 2);
        }
        return t;
    }

    i64 delta(i32 t) const {
        i64 a = problem.activation[tasks[t].letter / 2];
        return tasks[t].letter % 2 ? -a : a;
    }
    i64 excess(i32 d, i64 units) const { return units > targets[d] ? std::max(units - targets[d], least) : 0; }
    i64 latency() const {
        i64 latest = 0;
        for (i32 t : sinks) latest = std::max(latest, tasks[t].end);
        return latest;
    }

    // ends of what a task waits for in its pipeline, and rests of what waits for it
    i64 fed_at(const Task& t) const { return std::max(tasks[t.feeds[0]].end, tasks[t.feeds[1]].end); }
    i64 onward(const Task& t) const { return std::max(tasks[t.fed[0]].rest, tasks[t.fed[1]].rest); }
    i32 task_at(i32 slot) const {  // where no task has several slots, it has its task's number
        if constexpr (kSingle) return slot;
        else return task[slot];
    }
    i64 end_at(i32 slot) const { return tasks[task_at(slot)].end; }
    i64 rest_at(i32 slot) const { return tasks[task_at(slot)].rest; }

    // slots of a task
    template <class F> void of(i32 t, F f) const {
        if constexpr (kSingle) return f(t);
        for (i32 slot = tasks[t].first; slot < tasks[t + 1].first; ++slot) f(slot);
    }
    // slots of two tasks on a device that they share
    template <class F> void shared(i32 x, i32 y, F f) const {
        if constexpr (kSingle) return f(x, y);
        for (i32 a = tasks[x].first; a < tasks[x + 1].first; ++a)
            for (i32 b = tasks[y].first; b < tasks[y + 1].first; ++b)
                if (device[a] == device[b]) f(a, b);
    }
    bool is_on(i32 t, i32 d) const {
        for (i32 slot = tasks[t].first; slot < tasks[t + 1].first; ++slot)
            if (device[slot] == d) return true;
        return false;
    }
    // slots next to a task's where another task is not
    template <class F> void apart(i32 t, i32 other, const std::vector<i32>& links, F f) const {
        for (i32 slot = tasks[t].first; slot < tasks[t + 1].first; ++slot)
            if (!is_on(other, device[slot])) f(links[slot]);
    }

    // Longest way through two neighbours after they have changed places, or -1 where they cannot.
    i64 way(i32 x, i32 y) const {
        const Task &tx = tasks[x], &ty = tasks[y];
        if (tx.letter == ty.letter || ty.feeds[0] == x || ty.feeds[1] == x) return -1;
        const i64 at = ty.end - ty.duration;
        for (i32 u : tx.fed)
            if (u != n_tasks && at >= tasks[u].end) return -1;
        i64 head_y = fed_at(ty), head_x = fed_at(tx), tail_x = onward(tx), tail_y = onward(ty);
        if constexpr (kSingle) {
            head_y = std::max(head_y, end_at(before[tx.first]));
            tail_x = std::max(tail_x, rest_at(after[ty.first]));
        } else {
            bool ok = true;
            shared(x, y, [&](i32 a, i32 b) { ok &= after[a] == b; });
            for (i32 slot = tx.first; slot < tasks[x + 1].first; ++slot)
                ok &= task[after[slot]] == y || after[slot] == n_slots || at < end_at(after[slot]);
            if (!ok) return -1;
            shared(x, y, [&](i32 a, i32 b) {
                head_y = std::max(head_y, end_at(before[a]));
                tail_x = std::max(tail_x, rest_at(after[b]));
            });
            apart(y, x, before, [&](i32 slot) { head_y = std::max(head_y, end_at(slot)); });
            apart(x, y, before, [&](i32 slot) { head_x = std::max(head_x, end_at(slot)); });
            apart(x, y, after, [&](i32 slot) { tail_x = std::max(tail_x, rest_at(slot)); });
            apart(y, x, after, [&](i32 slot) { tail_y = std::max(tail_y, rest_at(slot)); });
        }
        head_x = std::max(head_x, head_y + ty.duration);
        tail_y = std::max(tail_y, tail_x + tx.duration);
        return std::max(head_y + ty.duration + tail_y, head_x + tx.duration + tail_x);
    }

    void move(u64 seed, u64 number, double weight, double temperature) {
        const u64 z = mixed(seed, number);
        const std::vector<i32>& slots = (z & 1) && !over.empty() ? over : open;
        if (slots.empty()) return;
        const i32 slot = slots[((z >> 32) * slots.size()) >> 32];
        const i32 x = task_at(slot), y = task_at(after[slot]);
        if (y == n_tasks) return;
        const i64 longest = way(x, y);
        if (longest < 0) return;
        const Task &tx = tasks[x], &ty = tasks[y];
        const i64 until_now = std::max(tx.end + tx.rest - tx.duration, ty.end + ty.rest - ty.duration);
        i64 more = 0;
        shared(x, y, [&](i32 a, i32 b) { more += excess(device[a], held[b] - delta(x)) - excess(device[a], held[a]); });
        const i64 later = std::max<i64>(0, longest - limit) - std::max<i64>(0, until_now - limit);
        const double change = static_cast<double>(more) + weight * static_cast<double>(later);
        if (change > 0) {
            const u64 bits = ((z >> 1) & 0x7fffffff) | 1;
            const int n = __builtin_clzll(bits) - 33;  // leading zeros of 31 bits
            const double luck = static_cast<double>(n + 2) - static_cast<double>(bits << n) * 0x1p-30;
            if (change > temperature * luck) return;
        }
        swap(x, y);
    }

    void swap(i32 x, i32 y) {
        queue.clear(), backwards.clear();
        queue.push_back(y), queue.push_back(x), backwards.push_back(x), backwards.push_back(y);
        shared(x, y, [&](i32 a, i32 b) {
            const i32 p = before[a], n = after[b];
            if (n != n_slots) queue.push_back(task[n]), before[n] = a;
            if (p != n_slots) backwards.push_back(task[p]), after[p] = b;
            else start[device[a]] = b;
            before[b] = p, after[b] = a, before[a] = b, after[a] = n;
            if (p != n_slots) set_open(p);
            set_open(a), set_open(b);
            const i64 total = held[b];
            set_held(b, total - delta(x), false);
            set_held(a, total, false);
        });
        settle<&Task::end, &Task::feeds, &Task::fed>(queue, before, after);
        settle<&Task::rest, &Task::fed, &Task::feeds>(backwards, after, before);
    }

    // Times of due tasks from those of what is before them, and so on to what is behind; which has to be looked at only if
    // the task was the latest that it waits for, or is now.
    template <i64 Task::*kTime, i32 (Task::*kBefore)[2], i32 (Task::*kBehind)[2]>
    void settle(std::vector<i32>& due, const std::vector<i32>& slot_before, const std::vector<i32>& slot_behind) {
        for (std::size_t at = 0; at < due.size(); ++at) {
            const i32 i = due[at];
            Task& t = tasks[i];
            i64 time = std::max(tasks[(t.*kBefore)[0]].*kTime, tasks[(t.*kBefore)[1]].*kTime);
            of(i, [&](i32 slot) { time = std::max(time, tasks[task_at(slot_before[slot])].*kTime); });
            time += t.duration;
            const i64 until_now = t.*kTime;
            if (time == until_now) continue;
            t.*kTime = time;
            auto visit = [&](i32 u) {
                const i64 begin = tasks[u].*kTime - tasks[u].duration;
                if (u != n_tasks && (time > begin || until_now == begin)) due.push_back(u);
            };
            visit((t.*kBehind)[0]), visit((t.*kBehind)[1]);
            of(i, [&](i32 slot) { visit(task_at(slot_behind[slot])); });
        }
    }

    void set_held(i32 slot, i64 units, bool is_new) {
        const i32 d = device[slot];
        if (!is_new) energy -= excess(d, held[slot]);
        held[slot] = units;
        const i64 e = excess(d, units);
        energy += e;
        enter(slot, over, over_at, e > 0);
    }

    void set_open(i32 slot) {  // those whose task may change places with the next one
        const i32 x = task_at(slot), y = task_at(after[slot]);
        enter(slot, open, open_at, y != n_tasks && tasks[x].letter != tasks[y].letter && tasks[y].feeds[0] != x && tasks[y].feeds[1] != x);
    }

    static void enter(i32 slot, std::vector<i32>& slots, std::vector<i32>& at_of, bool belongs) {
        const i32 at = at_of[slot];
        if (belongs && at < 0) {
            at_of[slot] = slots.size();
            slots.push_back(slot);
        } else if (!belongs && at >= 0) {
            const i32 last = slots.back();
            slots.pop_back();
            if (last != slot) slots[at] = last, at_of[last] = at;
            at_of[slot] = -1;
        }
    }

    void link(const i64* words) {
        for (i64 d = 0; d < problem.n_devices; ++d) {
            std::vector<i64> done(2 * problem.n_stages);
            i64 n = 0, units = 0;
            i32 last = n_slots;
            for (i64 l : problem.letters_on[d]) n += problem.n_micro_batches[l / 2];
            for (i64 i = 0; i < n; ++i) {
                const i64 l = *words++;
                const i32 t = problem.base[l] + done[l]++;
                i32 slot = tasks[t].first;
                while (device[slot] != d) ++slot;
                before[slot] = last;
                if (last == n_slots) start[d] = slot;
                else after[last] = slot;
                held[slot] = units += delta(t);
                last = slot;
            }
        }
    }

    void set_ways() {
        std::vector<i32> open(n_tasks), order;
        auto ahead = [&](i32 t, auto f) {
            for (i32 u : tasks[t].feeds) if (u != n_tasks) f(u);
            for (i32 slot = tasks[t].first; slot < tasks[t + 1].first; ++slot) if (before[slot] != n_slots) f(task[before[slot]]);
        };
        auto behind = [&](i32 t, auto f) {
            for (i32 u : tasks[t].fed) if (u != n_tasks) f(u);
            for (i32 slot = tasks[t].first; slot < tasks[t + 1].first; ++slot) if (after[slot] != n_slots) f(task[after[slot]]);
        };
        for (i32 t = 0; t < n_tasks; ++t) {
            ahead(t, [&](i32) { ++open[t]; });
            if (!open[t]) order.push_back(t);
        }
        for (std::size_t at = 0; at < order.size(); ++at) {
            const i32 t = order[at];
            i64 head = 0;
            ahead(t, [&](i32 u) { head = std::max(head, tasks[u].end); });
            tasks[t].end = head + tasks[t].duration;
            behind(t, [&](i32 u) { if (!--open[u]) order.push_back(u); });
        }
        for (auto t = order.rbegin(); t != order.rend(); ++t) {
            i64 tail = 0;
            behind(*t, [&](i32 u) { tail = std::max(tail, tasks[u].rest); });
            tasks[*t].rest = tail + tasks[*t].duration;
        }
    }

    void write(i64* words) const {
        for (i32 slot : start)
            for (; slot != n_slots; slot = after[slot]) *words++ = tasks[task[slot]].letter;
    }
};

// ---------------------------------------------------------------- islands.py

template <bool kSingle>
i64 cross(const Problem& problem, const i64* first, const i64* second, const i64* times, i64 n_times, const i64* targets,
          i64 limit, double weight, i64* words) {
    const State<kSingle> parent(problem, first, limit, targets);
    const i64 n_letters = 2 * problem.n_stages;
    i64 n_words = 0, n_children = 0;
    for (const auto& own : problem.letters_on)
        for (i64 l : own) n_words += problem.n_micro_batches[l / 2];
    std::vector<i64> child(n_words), n_begun(n_letters), left, rest;
    double least = 0.0;
    for (i64 i = 0; i < n_times; ++i) {
        for (i64 l = 0; l < n_letters; ++l) {
            i64 t = problem.base[l];
            while (t < problem.base[l + 1] && parent.tasks[t].end - problem.duration[l] < times[i]) ++t;
            n_begun[l] = t - problem.base[l];
        }
        i64 begin = 0;
        for (const auto& own : problem.letters_on) {
            i64 end = begin;
            for (i64 l : own) end += problem.n_micro_batches[l / 2];
            left = n_begun, rest.clear();
            for (i64 k = begin; k < end; ++k)
                if (left[second[k]]) --left[second[k]];
                else rest.push_back(second[k]);
            std::copy(first + begin, first + end - rest.size(), child.begin() + begin);
            std::copy(rest.begin(), rest.end(), child.begin() + end - rest.size());
            begin = end;
        }
        if (std::equal(child.begin(), child.end(), first) || std::equal(child.begin(), child.end(), second)) continue;
        const State<kSingle> state(problem, child.data(), limit, targets);
        const double cost = static_cast<double>(state.energy) + weight * static_cast<double>(std::max<i64>(0, state.latency() - limit));
        if (!n_children++ || cost < least) least = cost, std::copy(child.begin(), child.end(), words);
    }
    return n_children;
}

// ---------------------------------------------------------------- shifting.py

struct Shifting {
    const Problem &problem, &mirrored;
    const i64 *caps;
    u64 seed;
    std::vector<i64> starts, letter, quotas, keys;
    std::vector<std::vector<i64>> words;
    i64 latency, unit;

    Shifting(const Problem& p, const Problem& m, const i64* caps_, const State<false>& state, u64 seed_)
        : problem(p), mirrored(m), caps(caps_), seed(seed_), quotas(p.n_stages, i64{1} << 30), keys(p.base.back()), latency(state.latency()) {
        i64 total = 0;
        for (i64 l = 0; l < 2 * p.n_stages; ++l) {
            total += p.duration[l];
            for (i64 t = p.base[l]; t < p.base[l + 1]; ++t) letter.push_back(l), starts.push_back(state.tasks[t].end - p.duration[l]);
        }
        unit = std::max<i64>(1, total / (2 * p.n_stages));
    }

    i64 mirror(i64 task) const {
        const i64 l = letter[task];
        return problem.base[l ^ 1] + problem.base[l + 1] - 1 - task;
    }

    void step(i64 number) {
        auto draw = [&](u64 j, i64 n) { return static_cast<i64>(mixed(seed, 12 * static_cast<u64>(number) + j) % static_cast<u64>(n)); };
        const bool is_backwards = draw(0, 2);
        const i64 first = draw(1, 2 * latency + 1), last = first + (unit << (draw(2, 7) + 2));
        const i64 pipeline = draw(3, problem.pipeline[problem.n_stages - 1] + 2), kind = draw(4, 3), place = draw(5, 4);
        const i64 from = draw(6, problem.n_devices), to = place == 1 ? problem.n_devices : from + draw(7, problem.n_devices);
        const i64 most = (unit << draw(8, 7)) / 4, shift = place == 0 ? 0 : draw(9, 2 * most + 1) - most;
        const i64 noise = draw(10, 2) ? 0 : (unit << draw(11, 5)) / 2;
        const u64 choice = mixed(seed ^ 1, number), grain = mixed(seed ^ 2, number);
        for (i64 t = 0; t < static_cast<i64>(keys.size()); ++t) {
            const i64 l = letter[t], s = l / 2, device = problem.devices[problem.device_begin[s]];
            i64 key = 2 * starts[t] + problem.duration[l];
            if (first <= key && key < last && (pipeline == problem.pipeline[s] || pipeline > problem.pipeline[problem.n_stages - 1]) &&
                (kind == 2 || kind == l % 2) && (place == 1 || (from <= device && device <= to))) {
                key += shift;
                if (noise) key += static_cast<i64>(mixed(grain, t) % static_cast<u64>(2 * noise + 1)) - noise;
            }
            if (is_backwards) keys[mirror(t)] = 2 * latency - key;
            else keys[t] = key;
        }
        const i64 patience[4] = {-1, 0, unit, 4 * unit};
        const std::vector<double> none;
        Listing run(is_backwards ? mirrored : problem, caps, quotas.data(), none.data(), 0.0, static_cast<double>(patience[choice & 3]), 0);
        run.keys = keys.data(), run.limit = latency;
        run.window = choice & 4 ? kUnlimited : unit << (2 + (choice >> 3) % 5);
        const i64 listed = run.run();
        if (listed < 0 || listed > latency) return;
        latency = listed, words = run.words;
        if (!is_backwards) {
            starts = run.starts;
            return;
        }
        for (i64 t = 0; t < static_cast<i64>(keys.size()); ++t) {
            const i64 m = mirror(t);
            starts[t] = listed - run.starts[m] - mirrored.duration[letter[m]];
        }
        for (auto& word : words) {
            std::reverse(word.begin(), word.end());
            for (i64& l : word) l ^= 1;
        }
    }
};

}  // namespace

extern "C" {

// Latency of a rule's list schedule, or -1 where memory lets nothing go on. Writes the peak, and the words, device after device, if
// every stage has a quota.
i64 fusion_list(const i64* data, const i64* caps, const i64* quotas, const double* weights, double noise, double patience,
                u64 seed, const double* paces, i64* peak, i64* words) {
    Problem problem(data);
    Listing run(problem, caps, quotas, weights, noise, patience, seed);
    if (paces) run.pace(paces);
    i64 latency = run.run();
    *peak = run.peak;
    if (latency >= 0)
        for (const auto& word : run.words) words = std::copy(word.begin(), word.end(), words);
    return latency;
}

// Latency of words, or -1 if they are cyclic.
i64 fusion_evaluate(const i64* data, const i64* words) {
    Problem problem(data);
    std::vector<const i64*> at(problem.n_devices), end(problem.n_devices);
    std::vector<std::vector<i64>> on(problem.n_devices), ends(2 * problem.n_stages);
    for (i64 s = 0; s < problem.n_stages; ++s) {
        ends[2 * s].reserve(problem.n_micro_batches[s]), ends[2 * s + 1].reserve(problem.n_micro_batches[s]);
        for (i64 k = problem.device_begin[s]; k < problem.device_begin[s + 1]; ++k) on[problem.devices[k]].push_back(s);
    }
    for (i64 d = 0; d < problem.n_devices; ++d) {
        at[d] = words;
        for (i64 s : on[d]) words += 2 * problem.n_micro_batches[s];
        end[d] = words;
    }
    std::vector<i64> free(problem.n_devices, 0);
    auto starts_next = [&](i64 letter) {
        const i64 s = letter / 2;
        const size_t m = ends[letter].size();
        i64 start = 0;
        auto is_fed = [&](i64 by) {
            if (ends[by].size() <= m) return false;
            start = std::max(start, ends[by][m]);
            return true;
        };
        if (letter % 2 ? !is_fed(letter - 1) || (!problem.last[s] && !is_fed(letter + 2)) : problem.position[s] && !is_fed(letter - 2))
            return false;
        for (i64 k = problem.device_begin[s]; k < problem.device_begin[s + 1]; ++k) {
            const i64 d = problem.devices[k];
            if (at[d] == end[d] || *at[d] != letter) return false;
            start = std::max(start, free[d]);
        }
        ends[letter].push_back(start + problem.duration[letter]);
        for (i64 k = problem.device_begin[s]; k < problem.device_begin[s + 1]; ++k)
            ++at[problem.devices[k]], free[problem.devices[k]] = ends[letter].back();
        return true;
    };
    bool has_changed = true;
    while (has_changed) {
        has_changed = false;
        for (i64 d = 0; d < problem.n_devices; ++d)
            while (at[d] < end[d] && starts_next(*at[d])) has_changed = true;
    }
    return at == end ? *std::max_element(free.begin(), free.end()) : -1;
}

// Tries changes, n_moves at each temperature, and writes the words back. Returns how many were tried; the outcome is latency and
// excess.
i64 fusion_anneal(const i64* data, const i64* targets, i64 limit, double weight, const double* temperatures, i64 n_temperatures,
                  i64 n_moves, u64 seed, i64* outcome, i64* words) {
    Problem problem(data);
    auto run = [&](auto&& state) {
        i64 number = 0;
        bool is_done = !state.energy && state.latency() <= limit;
        for (i64 i = 0; i < n_temperatures && !is_done; ++i)
            for (i64 k = 0; k < n_moves && !is_done; ++k) {
                state.move(seed, number++, weight, temperatures[i]);
                is_done = !state.energy && state.latency() <= limit;
            }
        state.write(words);
        outcome[0] = state.latency(), outcome[1] = state.energy;
        return number;
    };
    if (problem.has_gangs) return run(State<false>(problem, words, limit, targets));
    return run(State<true>(problem, words, limit, targets));
}

// Cheapest of the words that begin like the first ones and end like the second ones, cut at some times, and that are neither.
// Returns how many such words there are.
i64 fusion_cross(const i64* data, const i64* first, const i64* second, const i64* times, i64 n_times, const i64* targets,
                 i64 limit, double weight, i64* words) {
    Problem problem(data);
    if (problem.has_gangs) return cross<false>(problem, first, second, times, n_times, targets, limit, weight, words);
    return cross<true>(problem, first, second, times, n_times, targets, limit, weight, words);
}

// Lists n_steps times with shifted starts as keys, and writes better words back. Returns how often; the outcome is the latency.
i64 fusion_shift(const i64* data, const i64* mirrored_data, const i64* caps, i64 enough, i64 n_steps, u64 seed, i64* outcome, i64* words) {
    Problem problem(data), mirrored(mirrored_data);
    State<false> state(problem, words, 0, caps);
    Shifting run(problem, mirrored, caps, state, seed);
    i64 number = 0;
    while (number < n_steps && run.latency > enough) run.step(number++);
    *outcome = run.latency;
    for (const auto& word : run.words) words = std::copy(word.begin(), word.end(), words);
    return number;
}

}  // extern "C"
