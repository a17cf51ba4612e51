//! (module docs to come with the content)
