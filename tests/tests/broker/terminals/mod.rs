//! Terminals of agents: their output as drivers read it, and questions of their programs.

mod output_streams;
mod queries;
