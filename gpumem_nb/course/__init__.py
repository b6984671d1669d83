"""The course: lessons whose exercises are checked against the session and against figures that are measured.

A student's notebook (``notebooks/course/``) says ``lesson = gm.lesson("1")`` and then ``lesson.check("1.2", guess)``,
or ``%lesson check 1.2 41 MB``. How to add a lesson or an exercise:

1. **The exercise** is one value in ``course/lessons/lesson_N.py``, listed in its ``LESSON``; a new lesson's file is
   named in ``course/lessons/__init__.py``. An :class:`~gpumem_nb.course.exercise.Exercise` has

   - ``number`` and ``title``, and ``asks``: the question in one or two sentences, which ``status()`` shows, too;
   - ``answer``: the form of the answer (:mod:`gpumem_nb.course.answers`): ``Size()``, ``Number(...)``, ``Word(...)``,
     ``Words(...)``, ``Variable(...)`` for the name of a variable on the ranks, ``RunAnswer()``, or ``Nothing()`` where
     the check looks at the session alone. What is not of that form gets one sentence and counts as no try;
   - ``judge(answer, evidence)``, which returns ``right(why)``, ``wrong(hint)`` or ``not_ready(what to do first)``;
   - ``hints``: from a nudge to nearly the answer, told one by one by ``hint()``.

2. **The judge** looks at what is measured, never at the text of cells. Two forms cover most exercises
   (:mod:`gpumem_nb.course.judges`): ``measured(...)`` compares a guess with a figure, shows both, and names the
   misconception whose figure was guessed; ``named(...)`` does so for words. Anything else is a function:
   ``evidence.session`` is the session (memory, settings, predict, run, pull …); ``evidence.measure(batch_size=8)``
   trains a few steps under these settings, records one, and puts the settings back, so a check gives the same whatever
   was run before it; ``evidence.of_function("pad", "memory")`` has ``pad`` of ``course/on_ranks/memory.py`` run inside
   of each rank, which calls the function ``pad`` that a student's cell defined there and returns what it measured;
   ``evidence.of_module("twice", "arithmetic()")`` calls one that is about no function of the student's (after
   ``evidence.needs_names("new_net", cell="…")`` where it takes names of cells: ``"drift(globals(), 20)"``);
   ``evidence.needs("text-gpt width=256")`` says what to load where something else is loaded. An error of the student's
   code on the ranks is told as a wrong answer, and so are ranks that wait for each other. A hint names the
   misconception ("That counts the gradients twice"), and does not give the figure.

3. **The notebook** has two cells for each exercise: the student's (``guess = ...``, or code; nbgrader: solution) and,
   below it, the check (nbgrader: grade, locked). Their ids are ``answer-1-2`` and ``check-1-2``. Give each answer a
   variable of its own, so that the order of cells does not matter. No cell of an exercise shows widgets.
   ``python -m tests.course.metadata FILE`` writes nbgrader's metadata and takes outputs away. At least one picture is
   in ``notebooks/course/pictures/N_….svg``, drawn from measured figures by ``tests/course/pictures/lesson_N.py``
   (``svg.py`` beside it has areas, lines and words).

4. **The answers** are in ``notebooks/course/answers/lesson_N.toml``. An answer is the source of the student's cell. For
   each exercise ``right`` has at least five different ways, of which the first is the one that the notebook goes on
   with; ``wrong`` has answers with some words of the hint that each must get. ``make course`` also makes wrong answers
   by changing right ones; ``still_right`` lists those that are right as well. ``[[figures]]`` has every number of the
   prose that was measured: its text, the cell ``after`` which it is measured again by the expression ``measured`` (in
   which ``measure`` is ``evidence.measure``), and the tolerance ``within``. ``given`` lists the other numbers.

``make course`` runs all of it on real ranks (``tests/course/``); ``pytest tests/course -k "[1]"`` runs one lesson.

Progress is kept for each user and lesson (:mod:`gpumem_nb.course.progress`), so nothing depends on the order of cells,
or on the kernel's life. Inside nbgrader (which sets ``NBGRADER_EXECUTION``) a check that is not right raises;
``nbgrader generate_assignment`` needs ``--ClearSolutions.enabled=False``, because the cells hold no solutions that it
could clear.
"""
