"""Problems of the present session, their fixes, and what each fix saves and costs."""
