"""What checks run inside of a rank: a student's functions on small models, with what is measured about them.

Each function here takes the variables of the rank's cells, calls the student's function that it is about, and returns
plain numbers; judges in ``course/lessons`` compare them. Models and samples are the same on every call.
"""
