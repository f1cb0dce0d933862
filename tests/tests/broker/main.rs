//! Our broker with fake agents, against a real engine: the way of a message, the listen API, restarts,
//! faults of the published broker, crashes, floods, hostile input, secrets.

mod api;
mod command_line;
mod continuity;
mod delivery;
mod event_log;
mod faults;
mod flood;
mod full_disk;
mod gates;
mod harness;
mod headless;
mod hostile;
mod programs;
mod published;
mod receipts;
mod restart;
mod restart_policy;
mod run_as;
mod runner;
mod scene;
mod secrets;
mod storm;
mod terminals;
mod traces;
mod verdicts;
mod workspaces;
