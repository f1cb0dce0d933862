//! Deliveries without a socket: pushed, claimed, redriven; and calls of event subscriptions.

mod answers;
mod dead_letters;
mod dispatch;
mod health;
mod poll;
mod subscription_calls;
mod workers;
