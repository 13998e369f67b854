"""Every order in which a few threads may run, one after another: a small model checker of the real code.

Threads run one at a time, and change only at points that they announce. `every_order` runs a scenario once for each
sequence of choices at these points, with at most ``most_switches`` of those that nobody had to make.
"""

import threading


class Stopped(BaseException):
    """Ends the threads of a run that has failed."""


class Turns:
    """One run: threads that take turns as ``choices`` say."""

    def __init__(self, choices, most_switches):
        self.choices = list(choices)
        self.taken = []
        """At each point what was chosen, and of how many."""
        self._switches_left = most_switches
        self._threads = {}
        self._current = None
        self._back = threading.Semaphore(0)
        self._errors = []
        self._is_stopped = False

    def point(self, until=None):
        """Another thread may run before this one goes on; it waits ``until()`` holds."""
        me = self._current
        if me is None or threading.current_thread() is not me.thread:
            return  # what the test itself does, before or after
        me.until = until
        self._back.release()
        me.go.acquire()
        if self._is_stopped:
            raise Stopped

    def run(self, *programs):
        """Runs each program in a thread of its own, to the end of all. Raises what the first of them raised."""
        running = [_Thread(self, program) for program in programs]
        last = None
        while running:
            may_run = [thread for thread in running if thread.until is None or thread.until()]
            if not may_run or self._errors:
                self._stop(running)
                raise self._errors[0] if self._errors else AssertionError("the threads wait for each other")
            self._current = last = self._choose(may_run, last)
            last.go.release()
            self._back.acquire()
            running = [thread for thread in running if not thread.has_ended]
        self._current = None
        if self._errors:
            raise self._errors[0]

    def _choose(self, may_run, last):
        if last in may_run:
            if not self._switches_left:
                return last
            may_run = [last, *(thread for thread in may_run if thread is not last)]
        if len(may_run) == 1:
            return may_run[0]
        number = self.choices[len(self.taken)] if len(self.taken) < len(self.choices) else 0
        self.taken.append((number, len(may_run)))
        self._switches_left -= last in may_run and number > 0
        return may_run[number]

    def _stop(self, running):
        self._is_stopped = True
        for thread in running:
            self._current = thread
            thread.go.release()
            thread.thread.join()


class _Thread:
    def __init__(self, turns, program):
        self.until, self.has_ended = None, False
        self.go = threading.Semaphore(0)
        self.thread = threading.Thread(target=self._run, args=(turns, program), daemon=True)
        self.thread.start()

    def _run(self, turns, program):
        self.go.acquire()
        try:
            if not turns._is_stopped:
                program()
        except Stopped:
            pass
        except BaseException as error:
            turns._errors.append(error)
        self.has_ended = True
        turns._back.release()


class PointLock:
    """A lock before which threads may change."""

    def __init__(self, turns):
        self._turns, self._depth = turns, 0

    def __enter__(self):
        if not self._depth:
            self._turns.point()
        self._depth += 1

    def __exit__(self, *_):
        self._depth -= 1


def every_order(scenario, *, most_switches):
    """Runs ``scenario(turns)`` in every order; returns how many there are."""
    choices, num_orders = [], 0
    while True:
        turns = Turns(choices, most_switches)
        try:
            scenario(turns)
        except Exception as error:
            error.add_note(f"in the order {[number for number, _ in turns.taken]}")
            raise
        num_orders += 1
        choices = turns.taken
        while choices and choices[-1][0] == choices[-1][1] - 1:
            choices.pop()
        if not choices:
            return num_orders
        number, _ = choices.pop()
        choices = [choice for choice, _ in choices] + [number + 1]
