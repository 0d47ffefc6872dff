"""Rules that a correct master never breaks, looked at while a simulated run goes on and when it is over."""

from __future__ import annotations

from collections import defaultdict

from realrl.plan.hooks import Realloc
from realrl.sched.events import Finish, Send
from realrl.sched.messages import CallDone, MoveRows, RunCall, RunHooks
from realrl.sched.track.dispatch import PartKind

PARTS = RunCall | RunHooks | MoveRows


def part_of(request):
    """Return what all ranks of one part have in common."""
    return request.dispatch_id, PartKind.of(request)


def ids_of(request):
    """All samples of one rank's part of a call."""
    return tuple(dict.fromkeys(sample_id for minibatch in request.minibatches for sample_id in minibatch))


class Checks:
    """A part of `tests.sched.simulator.Simulation`, whose attributes it reads."""

    # ------------------------------------------------------------ what must never happen

    def check_load(self, rank, request):
        assert rank == self.plan.dataset_rank
        assert len(request.ids) == len(request.rows)
        for sample_id, row in zip(request.ids, request.rows, strict=True):
            assert sample_id.split("/")[1] == f"row{row}"
            assert sample_id not in self.index, "loaded twice"
            self.index[sample_id] = len(self.order)
            for name, known in self.known.items():
                if sample_id in known:
                    self.taken[name].add(len(self.order))
            self.order.append(sample_id)

    def check_decisions(self, instructions):
        """Look at what the master decided, with no more than what it was told."""
        dispatches = {}
        for instruction in instructions:
            if isinstance(instruction, Send) and isinstance(instruction.request, RunCall):
                request = instruction.request
                dispatches.setdefault(request.dispatch_id, (request.call, request.step, set()))[2].update(
                    self.index[sample_id] for sample_id in ids_of(request)
                )
        for name, step, indices in dispatches.values():
            call, steps_before = self.calls[name], step - self.plan.first_step
            self.n_dispatched[name] += 1
            assert self.n_dispatched[name] - self.n_done[name] == 1, "two dispatches of one call are under way"
            if call.mfc.is_train:
                assert self.steps_done(name) >= steps_before
            for lead in () if self.plan.in_flight.calls else call.leads:
                assert self.is_ahead(lead, min(step + lead.lead, self.start.last_step)), "a stale reader is not ahead"
            for wait in call.waits_for:
                if not self.calls[wait.before].feeds_drop:
                    assert self.steps_done(wait.before) >= steps_before + 1 - wait.lag, "the weights are too old"
            if call.mfc.min_n_seqs is not None and not self.plan.drops:
                assert sorted(indices) == self.ready(call, steps_before)[: len(indices)], "not the oldest samples"
            self.taken[name] |= indices
        if not self.plan.in_flight.calls:
            self.check_waits_for_leads()
        for rank in range(self.plan.n_ranks):
            sent = [i.request for i in instructions if isinstance(i, Send) and i.rank == rank]
            runs = [request for request in [*self.ranks[rank].inbox, *sent] if isinstance(request, RunCall)]
            done = [reply.call for reply in self.ranks[rank].replies if isinstance(reply, CallDone)]
            n_open = sum(request.joins != "opens" for request in runs)  # a pair fills one place
            n_unseen = sum(self.calls[name].joins != "opens" for name in done)
            assert n_open + n_unseen <= 2, "a device has a long queue"

    def check_waits_for_leads(self):
        """No call waits for a stale reader that is ahead: only calls that wait for it could bring more samples."""
        for call in self.plan.calls if self.start is not None else ():
            for lead in (lead for lead in call.leads if lead.until != "finished"):
                told = self.master.explain(call.name).partition(f"'{lead.reader}' to read the same parameters at step ")
                assert not told[2] or not self.is_ahead(lead, int(told[2])), "it waits for a reader that is ahead"

    def is_ahead(self, lead, step):
        """Return True if the master knows that a stale reader has read for `step`, as far as its lead demands."""
        reader = self.calls[lead.reader]
        loaded, places = self.all_steps[step - self.plan.first_step]
        due = loaded[: len(loaded) if lead.until == "finished" else len(places)] if reader.feeds_drop else places
        has_read = (self.taken if lead.until == "sent" else self.done)[reader.name]
        before = self.dropping_before(reader) if reader.feeds_drop else []
        return all(
            self.index.get(i) in has_read
            or any(self.index.get(i) in self.done[d.name] and self.is_dropped_by(d, i) for d in before)
            for i in due
        )

    def steps_done(self, name):
        """Steps of this run that the master knows a call that does not stream to be done with."""
        n_seqs = self.calls[name].mfc.n_seqs
        return (self.n_done[name] * n_seqs + len(self.known[name])) // self.plan.step_size

    def ready(self, call, steps_before):
        """Numbers of the samples of one step that a call could take, as far as the master knows."""
        size = self.plan.step_size
        step = range(steps_before * size, (steps_before + 1) * size)
        return [
            i
            for i in step
            if i < len(self.order) and i not in self.taken[call.name]
            and set(call.mfc.input_keys) <= self.visible[self.order[i]]
        ]  # fmt: skip

    def check_dispatch(self, request):
        """The first rank entered a dispatch: look at what all ranks of the mesh were sent."""
        call = self.calls[request.call]
        parts = {}
        for rank in call.ranks:
            parts[rank] = next(
                q
                for q in (*self.ranks[rank].inbox, self.ranks[rank].opening)
                if isinstance(q, RunCall) and q.dispatch_id == request.dispatch_id
            )
            assert (parts[rank].call, parts[rank].step) == (call.name, request.step)
            assert parts[rank].n_steps == self.start.last_step
        for part in parts.values():
            n_minibatches = call.mfc.n_minibatches
            assert len(part.minibatches) == n_minibatches * call.mfc.n_passes
            for start in range(0, len(part.minibatches), n_minibatches):
                one_pass = [i for minibatch in part.minibatches[start : start + n_minibatches] for i in minibatch]
                assert sorted(one_pass) == sorted(ids_of(part)), "a pass is not over the batch"
            assert all(part.minibatches) or call.feeds_drop, "a rank has no sample in some minibatch"
        if call.mfc.protocol == "3D_PROTO":
            for dp_rank in range(call.allocation.strategy.dp):
                members = [parts[rank].minibatches for rank in call.allocation.dp_group_members(dp_rank)]
                assert len(set(members)) == 1
        ids = sorted({sample_id for part in parts.values() for sample_id in ids_of(part)})
        if not call.mfc.is_train:
            assert sorted(sample_id for part in parts.values() for sample_id in part.keeps) == ids
        for sample_id in ids:
            assert (call.name, sample_id) not in self.dispatch_of, "a call reads a sample twice"
            self.dispatch_of[call.name, sample_id] = request.dispatch_id

    def check_batches(self):
        """Look at the whole run: every batch that every call took, in order."""
        batches = self.batches()
        size, first = self.plan.step_size, self.plan.first_step
        if self.plan.drops:
            self.check_batches_with_drops(batches)
            return
        for name, call in self.calls.items():
            position = len(self.known[name])
            for step, indices in batches[name]:
                assert {first + index // size for index in indices} == {step}
                if call.mfc.min_n_seqs is None:
                    assert indices == list(range(position, position + call.mfc.n_seqs))
                else:
                    assert call.mfc.min_n_seqs <= len(indices) <= call.mfc.n_seqs
                position += len(indices)
            known = [self.index[sample_id] for sample_id in self.known[name]]
            assert sorted([*known, *(i for _, indices in batches[name] for i in indices)]) == list(range(position))

    def check_batches_with_drops(self, batches):
        """Calls after the dropping ones see the survivors by their place, and the others all that is loaded."""
        size, first = self.plan.step_size, self.plan.first_step
        expected = self.expected_steps(self.start.last_step - first + 1)
        assert self.order == [sample_id for loaded, _ in expected for sample_id in loaded]
        dropping = []
        for name, call in self.calls.items():
            gates = [*(self.calls[other] for other in call.gates), *(dropping if call.mfc.may_drop else ())]
            dropping += [call] if call.mfc.may_drop else []
            for index, (loaded, places) in enumerate(expected):
                found = [[self.order[i] for i in batch] for step, batch in batches[name] if step == first + index]
                seen = [sample_id for batch in found for sample_id in batch]
                assert all(batch and len(batch) <= call.mfc.n_seqs for batch in found)
                if call.feeds_drop:
                    assert set(seen) <= set(loaded)
                    assert not any(self.is_dropped_by(gate, i) for gate in gates for i in seen)
                    if not self.dropping_before(call):
                        assert sorted(seen) == sorted(loaded)
                        assert seen == loaded or call.mfc.min_n_seqs is not None
                elif call.mfc.min_n_seqs is None:
                    assert [sorted(b) for b in found] == [
                        sorted(places[i : i + call.mfc.n_seqs]) for i in range(0, size, call.mfc.n_seqs)
                    ]
                else:
                    assert sorted(seen) == sorted(places)
                assert len(set(seen)) == len(seen)

    def dropping_before(self, call):
        """The dropping calls before this one, by data or by an edge of their own."""
        produced = {key: other for other in self.plan.calls for key in other.mfc.output_keys}
        before = [
            *(produced[key] for key in call.mfc.input_keys if key in produced),
            *(self.calls[g] for g in call.gates),
        ]
        return [other for b in before for other in (*([b] if b.mfc.may_drop else []), *self.dropping_before(b))]

    def batches(self):
        """Call -> its batches in the order of dispatch, each a step and the sorted numbers of its samples."""
        found = defaultdict(dict)
        for instructions in self.instructions:
            for instruction in instructions:
                if isinstance(instruction, Send) and isinstance(instruction.request, RunCall):
                    request = instruction.request
                    batch = found[request.call].setdefault(request.dispatch_id, (request.step, set()))
                    batch[1].update(self.index[sample_id] for sample_id in ids_of(request))
        return {
            name: [(step, sorted(found[name][d][1])) for d, (step, _) in sorted(found[name].items())]
            for name in self.calls
        }

    def check_save(self, rank, step):
        """The homes hold exactly what `step` steps made of them."""
        n_steps = step - self.plan.first_step + 1
        for call in self.plan.calls:
            per_step = self.plan.step_size // call.mfc.n_seqs
            targets = [h.target for h in (*call.hooks.before, *call.hooks.after) if not self.is_local(h)]
            for role in [*targets, *([call.mfc.role] if call.mfc.is_train else [])]:
                if rank in self.homes[role].ranks:
                    assert self.ranks[rank].home[role] == n_steps * per_step

    @staticmethod
    def is_local(hook):
        return not isinstance(hook, Realloc) or hook.is_implied

    def check_complete_after_resume(self):
        """`check_complete`, but for what only an uninterrupted run that drops samples can tell."""
        assert self.end == Finish(spans=self.end.spans), self.end
        assert self.master.n_living_samples == 0
        assert not any(any(r.store.values()) for r in self.ranks), "samples were never freed"

    def check_complete(self):
        """The run ended on its own: everything was done once, and nothing is left."""
        assert self.end == Finish(spans=self.end.spans), self.end
        n_steps = self.start.last_step - self.plan.first_step + 1
        assert [report.step for report in self.reports] == list(range(self.plan.first_step, self.start.last_step + 1))
        if not self.plan.drops:
            assert len(self.order) == n_steps * self.plan.step_size
            n_known = sum(map(len, self.known.values()))
            assert len(self.dispatch_of) + n_known == len(self.order) * len(self.calls)
        assert self.master.n_living_samples == 0
        for r in self.ranks:
            assert not r.inbox
            assert not r.replies
            assert not any(r.store.values()), "samples were never freed"
            assert r.visiting.keys() <= self.plan.overlap.resident, "parameters of a call are still there"
            assert not r.setting_out, "parameters are still on their way"
        assert all(self.answered[part] == ranks.keys() for part, ranks in self.sent.items())
        self.check_batches()
        assert all(commit is not None for commit in self.checkpoints.values())
