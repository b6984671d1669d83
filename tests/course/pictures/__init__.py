"""The course's pictures, drawn from what is measured: ``python -m tests.course.pictures.lesson_1`` draws one anew."""
